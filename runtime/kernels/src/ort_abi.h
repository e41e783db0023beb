// The part of onnxruntime's C API that this library calls, declared by itself. The API is a table of functions in a fixed
// order, to which new versions only append; a number below is a function's place in it. Checked against
// include/onnxruntime/core/session/onnxruntime_c_api.h with ORT_API_VERSION 29, run with onnxruntime 1.30.0, 1.31.1 and 1.32.0,
// and compared with the installed onnxruntime by `check_api` whenever the library is registered. ORT_API_CALL is empty on
// all 64-bit systems.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tformer::ort {

constexpr uint32_t API_VERSION = 24;  // onnxruntime 1.24, the first with GetTensorElementTypeAndShapeDataReference

struct Status;
struct Value;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;

enum ErrorCode : int { FAIL = 1, INVALID_ARGUMENT = 2 };
enum ElementType : int { ANY = 0, FLOAT = 1, INT8 = 3, INT32 = 6, INT64 = 7 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1, VARIADIC = 2 };

struct Api {
  const void* functions[415];
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

template <size_t PLACE, class Result, class... Arguments>
struct Function {
  static Result call(const Api* api, Arguments... arguments) {
    using Pointer = Result (*)(Arguments...);
    return reinterpret_cast<Pointer>(const_cast<void*>(api->functions[PLACE]))(arguments...);
  }
};

using CreateStatus = Function<0, Status*, ErrorCode, const char*>;
using GetErrorCode = Function<1, ErrorCode, const Status*>;
using GetErrorMessage = Function<2, const char*, const Status*>;
using CreateCustomOpDomain = Function<26, Status*, const char*, CustomOpDomain**>;
using CustomOpDomain_Add = Function<27, Status*, CustomOpDomain*, const struct CustomOp*>;
using AddCustomOpDomain = Function<28, Status*, SessionOptions*, CustomOpDomain*>;
using GetTensorMutableData = Function<51, Status*, Value*, void**>;
using KernelInfoGetAttribute_float = Function<85, Status*, const KernelInfo*, const char*, float*>;
using KernelInfoGetAttribute_int64 = Function<86, Status*, const KernelInfo*, const char*, int64_t*>;
using KernelInfoGetAttribute_string =
    Function<87, Status*, const KernelInfo*, const char*, char*, size_t*>;
using KernelContext_GetInputCount = Function<88, Status*, const KernelContext*, size_t*>;
using KernelContext_GetOutputCount = Function<89, Status*, const KernelContext*, size_t*>;
using KernelContext_GetInput = Function<90, Status*, const KernelContext*, size_t, const Value**>;
using KernelContext_GetOutput = Function<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**>;
using ReleaseStatus = Function<93, void, Status*>;
using KernelContext_ParallelFor =
    Function<274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>;
using GetTensorElementTypeAndShapeDataReference =
    Function<414, Status*, const Value*, ElementType*, const int64_t**, size_t*>;

// OrtCustomOp
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  Characteristic (*GetInputCharacteristic)(const CustomOp*, size_t);
  Characteristic (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, struct ShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // namespace tformer::ort
