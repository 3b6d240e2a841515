"""The peer of bench_install: an op of the suite as an extension that includes torch/extension.h.

The op's own source is included unchanged and bound with pybind11 over at::Tensor, as apex binds its
extensions; one translation unit per device.
"""

from __future__ import annotations

from pathlib import Path

from apex_te.op_builder import OpBuilder

from apex_te.contract import parse

_HEAD = """#include <torch/extension.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "{source}"

namespace {{

struct Arguments {{
  std::vector<DLTensor> views;
  std::vector<ApexTeArg> args;

  explicit Arguments(size_t tensors) {{ views.reserve(tensors); }}

  const DLTensor* view(const at::Tensor& t) {{
    static const DLDataType types[] = {{{{kDLUInt, 8, 1}}, {{kDLInt, 8, 1}}, {{kDLInt, 16, 1}},
                                        {{kDLInt, 32, 1}}, {{kDLInt, 64, 1}}, {{kDLFloat, 16, 1}},
                                        {{kDLFloat, 32, 1}}, {{kDLFloat, 64, 1}}}};
    const auto type = static_cast<size_t>(t.scalar_type());
    TORCH_CHECK(type < 8, "dtype is not bound here");
    views.push_back(DLTensor{{t.data_ptr(), {{t.is_cuda() ? kDLCUDA : kDLCPU, t.get_device()}},
                             static_cast<int32_t>(t.dim()), types[type],
                             const_cast<int64_t*>(t.sizes().data()),
                             const_cast<int64_t*>(t.strides().data()), 0}});
    return &views.back();
  }}
  ApexTeArg& next(int32_t kind) {{
    args.push_back(ApexTeArg{{kind, 0, {{0}}}});
    return args.back();
  }}
  void add(const at::Tensor& t) {{ next(kApexTeTensor).value.tensor = view(t); }}
  void add(const std::optional<at::Tensor>& t) {{
    if (t) add(*t);
    else next(kApexTeNone);
  }}
  void add(const std::vector<at::Tensor>& list) {{
    ApexTeArg& arg = next(kApexTeTensorList);
    arg.count = static_cast<int32_t>(list.size());
    arg.value.tensors = views.data() + views.size();
    for (const at::Tensor& t : list) view(t);
  }}
  void add(const std::vector<double>& list) {{
    ApexTeArg& arg = next(kApexTeFloatList);
    arg.count = static_cast<int32_t>(list.size());
    arg.value.floats = list.data();
  }}
  void add(int64_t i) {{ next(kApexTeInt).value.i = i; }}
  void add(double f) {{ next(kApexTeFloat).value.f = f; }}
  void add(bool b) {{ next(kApexTeBool).value.i = b; }}

  int64_t call(int32_t (*function)(ApexTeCall*)) {{
    ApexTeCall call{{args.data(), static_cast<int32_t>(args.size()), 0, nullptr, 0, 0, {{0}}}};
    if (function(&call)) throw std::runtime_error(call.error);
    return call.result;
  }}
}};

}}  // namespace

"""
_TYPES = {
    "Tensor": "const at::Tensor&",
    "Tensor?": "const std::optional<at::Tensor>&",
    "Tensor[]": "const std::vector<at::Tensor>&",
    "float[]": "const std::vector<double>&",
    "float": "double",
    "int": "int64_t",
    "bool": "bool",
}


def _binding(name: str, signature: str) -> str:
    """A C++ function over at::Tensor that calls the op's plain one."""
    parameters = parse(signature).params.values()
    pairs = [(p.name, p.kind + "?" * p.is_optional) for p in parameters]
    arguments = ", ".join(f"{_TYPES[kind]} {word}" for word, kind in pairs)
    count = " + ".join(
        [f"{word}.size()" for word, kind in pairs if kind == "Tensor[]"] + [str(len(pairs))]
    )
    adds = " ".join(f"a.add({word});" for word, _ in pairs)
    call = f"return a.call(apex_te_{name});"
    return f"int64_t bound_{name}({arguments}) {{ Arguments a({count}); {adds} {call} }}\n"


def write(op: OpBuilder, device: str, folder: Path) -> OpBuilder:
    """The builder of the same kernels as a torch extension, written below ``folder``."""
    functions = {
        name: spec.signature for name, spec in op.functions().items() if device in spec.devices
    }
    sources = op.device_sources(device)
    name = f"{op.NAME}_{device}_with_torch"
    place = folder / "csrc" / name
    place.mkdir(parents=True)
    ending = "cu" if device == "cuda" else "cpp"
    text = _HEAD.format(source=sources[0].removeprefix("csrc/"))
    text += "".join(_binding(function, signature) for function, signature in functions.items())
    defines = "".join(f'  m.def("{function}", &bound_{function});\n' for function in functions)
    text += f"\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{defines}}}\n"
    (place / f"{name}.{ending}").write_text(text)
    for source in sources[1:]:
        (place / f"more_{Path(source).name}").write_text(f'#include "{source[5:]}"\n')
    # nvcc 13.0 crashes over torch 2.13's headers as C++20
    attributes = {
        "NAME": name,
        "BINDING": "pybind11",
        "ROOT": str(folder),
        "nvcc_args": lambda self: ["-std=c++17"],
    }
    return type(name, (OpBuilder,), attributes)()
