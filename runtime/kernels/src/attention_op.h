// The operators of attention (attention_op.cpp).
#pragma once

#include "ort_abi.h"

namespace tformer {

ort::CustomOp attention_operator();
ort::CustomOp context_attention_operator();

}  // namespace tformer
