// Parallel loops for CPU kernels on the OpenMP runtime that the process already has.
//
// The runtime is reached through weak symbols, so a library needs none to load: inside torch it is
// torch's own (torch.set_num_threads governs), in a C++ program whatever that links, else one
// thread. Work is cut into chunks that depend on the shape alone, never on the thread count.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags)
    __attribute__((weak));
int omp_get_max_threads(void) __attribute__((weak));
int omp_in_parallel(void) __attribute__((weak));
}

namespace apex_te {

// libgomp's thread pool does not survive fork: a forked child stays on its one thread.
inline std::atomic<bool>& in_forked_child() {
  static std::atomic<bool> forked{false};
  return forked;
}

inline int max_threads() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { in_forked_child().store(true); });
  (void)registered;
  if (!GOMP_parallel || !omp_get_max_threads || in_forked_child().load()) return 1;
  if (omp_in_parallel && omp_in_parallel()) return 1;
  return omp_get_max_threads();
}

// Calls body(chunk) once for each chunk in [0, num_chunks), from any thread, in any order. What one
// throws, which must not leave a parallel region, ends the loop and is thrown behind it.
template <typename Body>
void parallel_for(int64_t num_chunks, const Body& body) {
  struct Shared {
    const Body* body;
    int64_t num_chunks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> has_error{false};
    std::exception_ptr error = nullptr;
  } shared{&body, num_chunks};
  const auto work = [](void* data) {
    auto* s = static_cast<Shared*>(data);
    try {
      for (int64_t i; (i = s->next.fetch_add(1, std::memory_order_relaxed)) < s->num_chunks;)
        (*s->body)(i);
    } catch (...) {
      s->next.store(s->num_chunks, std::memory_order_relaxed);
      if (!s->has_error.exchange(true)) s->error = std::current_exception();
    }
  };
  const int64_t threads = num_chunks < max_threads() ? num_chunks : max_threads();
  if (threads <= 1)
    work(&shared);
  else
    GOMP_parallel(work, &shared, static_cast<unsigned>(threads), 0);
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace apex_te
