// An op that writes down what a handler has given it.
#pragma once

#include "common/abi/op.h"

// notes (float64 [64]): count, and for each tensor dtype code, bits, ndim, extents, first byte;
// then the scalars. None is -1; a list has its length first.
APEX_TE_FUNCTION(probe_note,
                 "x: Tensor?, list: Tensor[], notes: Tensor!, i: int, f: float, b: bool, "
                 "fs: float[]")
// out = the number of the tensor in its list, in each tensor.
APEX_TE_FUNCTION(probe_number, "outs: Tensor![]")
// x += x, and mode = the word of the CPU that governs subnormal numbers meanwhile.
APEX_TE_FUNCTION(probe_double, "x: Tensor!, mode: Tensor!")
APEX_TE_FUNCTION(probe_fail, "x: Tensor, out: Tensor!, kind: int")
