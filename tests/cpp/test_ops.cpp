// Opens op libraries without Python or torch and checks what they compute: the C interface that
// other frameworks use.   test_ops CAST_TRANSPOSE.so AMAX_SCALE_UPDATE.so FP8_GEMM.so
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/abi/op.h"

namespace {

int g_passed = 0, g_failed = 0;

void check(bool ok, const char* what) {
  ok ? ++g_passed : ++g_failed;
  if (!ok) fprintf(stderr, "FAILED: %s\n", what);
}

using Function = int32_t (*)(ApexTeCall*);

void* open_library(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  const auto* abi = static_cast<const int32_t*>(dlsym(handle, "apex_te_abi"));
  check(abi && *abi == APEX_TE_ABI, "the library's ABI number");
  return handle;
}

Function function(void* handle, const char* name) {
  auto* found = reinterpret_cast<Function>(dlsym(handle, name));
  if (!found) {
    fprintf(stderr, "no %s\n", name);
    exit(1);
  }
  return found;
}

struct Tensor {
  std::vector<int64_t> shape;
  DLTensor view;
  Tensor(void* data, DLDataType dtype, std::vector<int64_t> extents) : shape(std::move(extents)) {
    view = {data, {kDLCPU, 0}, static_cast<int32_t>(shape.size()), dtype, shape.data(), nullptr, 0};
  }
  Tensor(const Tensor&) = delete;
};

constexpr DLDataType kFloat{kDLFloat, 32, 1}, kE4M3{kDLFloat8_e4m3fn, 8, 1}, kInt{kDLInt, 32, 1};

ApexTeArg arg(const Tensor& t) {
  ApexTeArg a{kApexTeTensor, 0, {}};
  a.value.tensor = &t.view;
  return a;
}
ApexTeArg list(const DLTensor* tensors, int count) {
  ApexTeArg a{kApexTeTensorList, count, {}};
  a.value.tensors = tensors;
  return a;
}
ApexTeArg none() { return ApexTeArg{kApexTeNone, 0, {}}; }
ApexTeArg integer(int32_t kind, int64_t value) {
  ApexTeArg a{kind, 0, {}};
  a.value.i = value;
  return a;
}

ApexTeCall call(Function f, const std::vector<ApexTeArg>& args) {
  ApexTeCall c{};
  c.args = args.data();
  c.num_args = static_cast<int32_t>(args.size());
  f(&c);
  return c;
}

void test_cast_transpose(const char* path) {
  const Function cast = function(open_library(path), "apex_te_cast_transpose");
  std::vector<float> x{0.0f, 1.0f, -2.0f, 1000.0f, 0.5f, NAN};
  std::vector<uint8_t> rowwise(6, 0xAA), columnwise(6, 0xAA);
  float scale = 2.0f, amax = 0.0f, scale_inv = 0.0f;
  Tensor tx(x.data(), kFloat, {2, 3}), ts(&scale, kFloat, {1}), ta(&amax, kFloat, {});
  Tensor ti(&scale_inv, kFloat, {1}), tr(rowwise.data(), kE4M3, {2, 3});
  Tensor tt(columnwise.data(), kE4M3, {3, 2});
  ApexTeCall c =
      call(cast, {arg(tx), arg(ts), arg(tr), arg(tt), arg(ta), arg(ti), none(), none(), none()});
  check(c.error_kind == kApexTeOk, c.error);
  const uint8_t expected[] = {0x00, 0x40, 0xC8, 0x7E, 0x38, 0x7F};
  const uint8_t expected_columnwise[] = {0x00, 0x7E, 0x40, 0x38, 0xC8, 0x7F};
  check(memcmp(rowwise.data(), expected, 6) == 0, "cast_transpose: rowwise codes");
  check(memcmp(columnwise.data(), expected_columnwise, 6) == 0, "cast_transpose: columnwise codes");
  check(std::isnan(amax), "cast_transpose: NaN wins the amax");
  check(scale_inv == 0.5f, "cast_transpose: scale_inv");

  Tensor wrong(rowwise.data(), kE4M3, {3, 2});
  c = call(cast, {arg(tx), arg(ts), arg(wrong), none(), none(), none(), none(), none(), none()});
  check(c.error_kind == kApexTeValueError, "cast_transpose: a wrong shape is a value error");
  check(strcmp(c.error, "cast_transpose: rowwise must have shape [2, 3], got [3, 2]") == 0,
        c.error);
  c = call(cast, {arg(tx), none(), arg(tr), none(), none(), none(), none(), none(), none()});
  check(c.error_kind == kApexTeTypeError, "cast_transpose: a missing tensor is a type error");
}

void test_amax_scale_update(const char* path) {
  const Function update = function(open_library(path), "apex_te_amax_scale_update");
  std::vector<float> history{4.0f, 0.0f, 7.0f, 1.0f, 2.0f, 8.0f}, scale{1.0f, 1.0f};
  std::vector<float> scale_inv{1.0f, 1.0f};
  int32_t nonfinite = 0;
  Tensor h(history.data(), kFloat, {3, 2}), s(scale.data(), kFloat, {2});
  Tensor i(scale_inv.data(), kFloat, {2}), n(&nonfinite, kInt, {1});
  const double fp8_max = 448.0;
  ApexTeArg limits{kApexTeFloatList, 1, {}};
  limits.value.floats = &fp8_max;
  const ApexTeCall c =
      call(update, {list(&h.view, 1), list(&s.view, 1), list(&i.view, 1), limits, arg(n),
                    integer(kApexTeInt, 0), integer(kApexTeBool, 0), integer(kApexTeBool, 0)});
  check(c.error_kind == kApexTeOk, c.error);
  const std::vector<float> expected{0.0f, 0.0f, 2.0f, 1.0f, 4.0f, 8.0f};
  check(history == expected, "amax_scale_update: one slot rolls, the other saw nothing");
  check(scale[0] == 64.0f && scale[1] == 1.0f, "amax_scale_update: scale");
  check(scale_inv[0] == 1.0f / 64.0f, "amax_scale_update: scale_inv");
}

void test_fp8_decode(const char* path) {
  const Function decode = function(open_library(path), "apex_te_fp8_decode");
  std::vector<uint8_t> codes{0x38, 0x7E, 0x01, 0x80};
  std::vector<float> values(4, NAN);
  Tensor c(codes.data(), kE4M3, {2, 2}), v(values.data(), kFloat, {2, 2});
  const ApexTeCall result = call(decode, {arg(c), arg(v)});
  check(result.error_kind == kApexTeOk, result.error);
  check(values == std::vector<float>({1.0f, 448.0f, std::ldexp(1.0f, -9), -0.0f}),
        "fp8_decode: values");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s CAST_TRANSPOSE.so AMAX_SCALE_UPDATE.so FP8_GEMM.so\n", argv[0]);
    return 2;
  }
  test_cast_transpose(argv[1]);
  test_amax_scale_update(argv[2]);
  test_fp8_decode(argv[3]);
  printf("%d passed, %d failed\n", g_passed, g_failed);
  return g_failed ? 1 : 0;
}
