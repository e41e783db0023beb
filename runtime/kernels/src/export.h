#pragma once

#define TFORMER_EXPORT extern "C" __attribute__((visibility("default")))
