// The operators of norms and gates (elementwise_op.cpp).
#pragma once

#include "ort_abi.h"

namespace tformer {

ort::CustomOp norm_operator();
ort::CustomOp gate_operator();

}  // namespace tformer
