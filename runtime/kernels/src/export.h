#pragma once

#if defined(_WIN32)
#define TFORMER_EXPORT extern "C" __declspec(dllexport)
#else
#define TFORMER_EXPORT extern "C" __attribute__((visibility("default")))
#endif
