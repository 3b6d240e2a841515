// Parses "x: Tensor, bias: Tensor?, out: Tensor!, sizes: float[] -> int"; "!": it is written.
// A contract such as "x: T[r c], out: T[r c]!; whole c" (apex_te/contract.py) says more of tensors.
#pragma once

#include <string>
#include <vector>

#include "common/abi/op.h"

namespace apex_te {

struct Parameter {
  std::string name;
  int32_t kind;
  bool is_optional;
};

struct Signature {
  std::vector<Parameter> parameters;
  bool returns_int = false;
};

// Returns an empty string, or what is wrong with the text.
inline std::string parse_signature(const std::string& text, Signature* out) {
  std::string body = text;
  const size_t arrow = body.find("->");
  if (arrow != std::string::npos) {
    out->returns_int = body.find("int", arrow) != std::string::npos;
    if (!out->returns_int) return "only '-> int' may be returned";
    body.resize(arrow);
  }
  if (body.find(';') != std::string::npos) body.resize(body.find(';'));
  const auto trim = [](const std::string& s) {
    const size_t begin = s.find_first_not_of(' ');
    if (begin == std::string::npos) return std::string();
    return s.substr(begin, s.find_last_not_of(' ') - begin + 1);
  };
  for (size_t begin = 0; begin < body.size();) {
    size_t end = body.find(',', begin);
    if (end == std::string::npos) end = body.size();
    const std::string item = trim(body.substr(begin, end - begin));
    begin = end + 1;
    if (item.empty()) continue;
    const size_t colon = item.find(':');
    if (colon == std::string::npos) return "no type for '" + item + "'";
    Parameter p{trim(item.substr(0, colon)), kApexTeNone, false};
    std::string type = trim(item.substr(colon + 1));
    const size_t bracket = type.find('[');  // of dimensions, unless it is that of a list
    if (bracket != std::string::npos && type.compare(bracket, 2, "[]") != 0)
      type = type.find("][") != std::string::npos  ? "Tensor[]"
             : type.find('?') != std::string::npos ? "Tensor?"
                                                   : "Tensor";
    if (type.compare(0, 7, "Tensor!") == 0) type.erase(6, 1);
    if (type == "Tensor")
      p.kind = kApexTeTensor;
    else if (type == "Tensor?")
      p.kind = kApexTeTensor, p.is_optional = true;
    else if (type == "Tensor[]")
      p.kind = kApexTeTensorList;
    else if (type == "int")
      p.kind = kApexTeInt;
    else if (type == "float")
      p.kind = kApexTeFloat;
    else if (type == "float[]")
      p.kind = kApexTeFloatList;
    else if (type == "bool")
      p.kind = kApexTeBool;
    else
      return "unknown type '" + type + "'";
    out->parameters.push_back(p);
  }
  return "";
}

}  // namespace apex_te
