/* A GPU that computes nothing, for onnxruntime's CUDA provider: memory is the host's, kernels and products are counted.
 *
 * So it can be seen without a GPU which nodes the provider takes, whether it captures a session as a CUDA graph, how
 * often it replays and what it copies. What a model answers is meaningless. `run.sh` says how it is built and put in
 * front of NVIDIA's libraries.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"

static int launches, captures, replays, to_device, from_device, capturing;

__attribute__((destructor)) static void report(void) {
  fprintf(stderr, "stand-in: %d launches, %d captures, %d replays, %d copies to the device, %d from it\n", launches,
          captures, replays, to_device, from_device);
}

static void *handle(void) { return calloc(1, 64); }

#define NOTHING(name, ...) \
  cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define SET(name, value, ...) \
  cudaError_t name(__VA_ARGS__) { *out = value; return cudaSuccess; }
#define LAUNCH(name, ...) \
  cudaError_t name(__VA_ARGS__) { launches++; return cudaSuccess; }

/* The device: an H100's limits. */
SET(cudaGetDeviceCount, 1, int *out)
SET(cudaGetDevice, 0, int *out)
SET(cudaDriverGetVersion, 13000, int *out)
SET(cudaRuntimeGetVersion, 13000, int *out)
NOTHING(cudaSetDevice, int device)
NOTHING(cudaDeviceSynchronize, void)
NOTHING(cudaGetLastError, void)
NOTHING(cudaPeekAtLastError, void)

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "stand-in");
  p->major = 9;
  p->totalGlobalMem = 1ull << 34;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->regsPerBlock = 65536;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->l2CacheSize = 1 << 25;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
    case cudaDevAttrMultiProcessorCount: *out = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    default: *out = 1024;
  }
  return cudaSuccess;
}

/* Memory. */
cudaError_t cudaMalloc(void **out, size_t size) {
  *out = aligned_alloc(512, size / 512 * 512 + 1024);
  return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocHost(void **out, size_t size) { return cudaMalloc(out, size); }
cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) { return cudaMalloc(out, size); }
cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
  return cudaMalloc(out, size);
}
cudaError_t cudaFree(void *p) { free(p); return cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { free(p); return cudaSuccess; }
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) { free(p); return cudaSuccess; }
SET(cudaMemPoolCreate, handle(), cudaMemPool_t *out, const struct cudaMemPoolProps *properties)
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *free_bytes = 1ull << 33;
  *total = 1ull << 34;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  to_device += kind == cudaMemcpyHostToDevice;
  from_device += kind == cudaMemcpyDeviceToHost;
  memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t at, enum cudaMemcpyKind kind) {
  memset(to, 0, size);
  if (size == 4) *(unsigned *)to = 1024; /* the shared memory that a kernel says it needs */
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) { memset(to, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return cudaMemset(to, value, size); }

/* Streams, events and graphs. */
SET(cudaStreamCreate, handle(), cudaStream_t *out)
SET(cudaStreamCreateWithFlags, handle(), cudaStream_t *out, unsigned flags)
NOTHING(cudaStreamDestroy, cudaStream_t stream)
NOTHING(cudaStreamSynchronize, cudaStream_t stream)
NOTHING(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
SET(cudaEventCreate, handle(), cudaEvent_t *out)
SET(cudaEventCreateWithFlags, handle(), cudaEvent_t *out, unsigned flags)
NOTHING(cudaEventDestroy, cudaEvent_t event)
NOTHING(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
NOTHING(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
NOTHING(cudaEventSynchronize, cudaEvent_t event)
SET(cudaEventElapsedTime, 1, float *out, cudaEvent_t begin, cudaEvent_t end)
SET(cudaStreamIsCapturing, capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaStream_t stream,
    enum cudaStreamCaptureStatus *out)
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  capturing = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
  capturing = 0;
  captures++;
  *out = handle();
  return cudaSuccess;
}
SET(cudaGraphInstantiate, handle(), cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { replays++; return cudaSuccess; }
NOTHING(cudaGraphDestroy, cudaGraph_t graph)
NOTHING(cudaGraphExecDestroy, cudaGraphExec_t graph)

/* Kernels and products. */
LAUNCH(cudaLaunchKernel, const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
LAUNCH(cudaLaunchCooperativeKernel, const void *f, dim3 grid, dim3 block, void **arguments, size_t shared,
       cudaStream_t stream)
LAUNCH(cudaLaunchKernelExC, const cudaLaunchConfig_t *config, const void *f, void **arguments)
LAUNCH(__cudaLaunchKernel, cudaKernel_t f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
NOTHING(cudaFuncSetAttribute, const void *f, enum cudaFuncAttribute which, int value)
SET(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2, int *out, const void *f, int block, size_t shared,
    unsigned flags)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *f) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->ptxVersion = out->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data) { f(data); return cudaSuccess; }

#define CREATE(name) \
  int name(void **out) { *out = handle(); return 0; }
#define IGNORE(name) \
  int name() { return 0; }
#define COUNT(name) \
  int name() { launches++; return 0; }
CREATE(cublasCreate_v2)
CREATE(cublasLtCreate)
IGNORE(cublasDestroy_v2)
IGNORE(cublasLtDestroy)
IGNORE(cublasSetStream_v2)
IGNORE(cublasSetMathMode)
int cublasGetMathMode(void *handle, int *out) { *out = 0; return 0; }
COUNT(cublasGemmEx)
COUNT(cublasGemmBatchedEx)
COUNT(cublasGemmStridedBatchedEx)
COUNT(cublasSgemm_v2)
COUNT(cublasSgemmBatched)
COUNT(cublasSgemmStridedBatched)
COUNT(cublasSgeam)
COUNT(cublasScopy_v2)
COUNT(cublasSscal_v2)
COUNT(cublasLtMatmul)
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *r,
                                   int *found) {
  *found = 1;
  return 0;
}
