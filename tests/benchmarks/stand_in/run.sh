#!/bin/sh
# Run a command on a GPU that computes nothing (cuda.c): ./run.sh tformer-run model.onnx text --device cuda
# Needs gcc, and NVIDIA's libraries in $NVIDIA, about 2 GB:
#   pip install --target "$NVIDIA" --no-deps nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-runtime nvidia-curand \
#       nvidia-cufft nvidia-nvjitlink nvidia-cuda-nvrtc; pip install --target "$NVIDIA/crt" --no-deps nvidia-cuda-crt
set -e
here=$(cd "$(dirname "$0")" && pwd)
built=$NVIDIA/stand-in cuda=$NVIDIA/nvidia/cu13 cudnn=$NVIDIA/nvidia/cudnn/lib
mkdir -p "$built"
gcc -w -shared -fPIC -I"$cuda/include" -I"$NVIDIA/crt/nvidia/cu13/include" -o "$built/cuda.so" "$here/cuda.c"
# cuDNN: whatever it is asked, it has done; the driver: there is none behind the runtime.
{
    echo '#include <stdlib.h>'
    nm -D --defined-only "$cudnn"/libcudnn*.so.9 | grep -oE ' T cudnn[A-Za-z0-9_]+' | cut -c4- | sort -u |
        grep -vxE 'cudnn(Create|GetVersion|GetCudartVersion|GetErrorString)' | sed 's/.*/int &() { return 0; }/'
    echo 'int cudnnCreate(void **out) { *out = calloc(1, 64); return 0; }'
    echo 'size_t cudnnGetVersion(void) { return 91900; } size_t cudnnGetCudartVersion(void) { return 13000; }'
    echo 'const char *cudnnGetErrorString(int error) { return "stand-in"; }'
} >"$built/cudnn.c"
gcc -w -shared -fPIC -Wl,-soname,libcudnn.so.9 -o "$built/libcudnn.so.9" "$built/cudnn.c"
echo 'int cuTensorMapEncodeTiled(void) { return 1; }' >"$built/driver.c"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$built/libcuda.so.1" "$built/driver.c"
# cuDNN's attention would read numbers from what this cuDNN has not done.
ORT_ENABLE_CUDNN_FLASH_ATTENTION=0 LD_PRELOAD=$built/cuda.so LD_LIBRARY_PATH=$built:$cuda/lib:$cudnn exec "$@"
