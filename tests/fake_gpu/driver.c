/* A CUDA driver that says yes, as libcuda.so.1: for Triton, which compiles its kernels for it and has them loaded.
   Nothing is launched.  See runtime.c. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0 };
typedef unsigned long long address;
static void *const handle = (void *)64;

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 1, SUCCESS; }
int cuDeviceGet(int *device, int number) { return *device = number, SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {/* CUdevice_attribute, of an H200 */
        {1, 1024}, {8, 48 << 10}, {10, 32}, {12, 65536}, {13, 1980000}, {16, 132}, {36, 3201000},
        {37, 6144}, {39, 2048}, {75, 9}, {76, 0}, {97, 227 << 10}};
    *value = 0;
    for (size_t row = 0; row < sizeof known / sizeof *known; row++)
        if (known[row][0] == attribute) *value = known[row][1];
    return SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return *out = handle, SUCCESS; }
int cuCtxGetCurrent(void **out) { return *out = handle, SUCCESS; }
int cuCtxPopCurrent_v2(void **out) { return *out = handle, SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
int cuCtxGetLimit(size_t *value, int limit) { return *value = 1 << 20, SUCCESS; }
int cuModuleLoad(void **out, const char *file) { return *out = handle, SUCCESS; }
int cuModuleLoadData(void **out, const void *image) { return *out = handle, SUCCESS; }
int cuModuleLoadDataEx(void **out, const void *image, unsigned count, void *options, void *values) {
    return *out = handle, SUCCESS;
}
int cuModuleGetFunction(void **out, void *module, const char *name) { return *out = handle, SUCCESS; }
int cuModuleGetGlobal_v2(address *start, size_t *size, void *module, const char *name) { return 500; }
int cuFuncGetModule(void **out, void *function) { return *out = handle, SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, SUCCESS; /* threads, registers */
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, ...) { return *count = 2, SUCCESS; }
int cuOccupancyMaxActiveClusters(int *count, ...) { return *count = 66, SUCCESS; }
int cuPointerGetAttribute(void *out, int attribute, address pointer) { return memset(out, 0, 8), SUCCESS; }
int cuGetErrorString(int error, const char **text) { return *text = "none", SUCCESS; }
int cuGetErrorName(int error, const char **text) { return *text = "none", SUCCESS; }

#define YES(name) \
    int name() { return SUCCESS; }
YES(cuInit)
YES(cuDevicePrimaryCtxRelease_v2)
YES(cuCtxSetCurrent)
YES(cuCtxPushCurrent_v2)
YES(cuCtxSetLimit)
YES(cuModuleUnload)
YES(cuFuncSetAttribute)
YES(cuFuncSetCacheConfig)
YES(cuLaunchKernel)
YES(cuLaunchKernelEx)
YES(cuLaunchCooperativeKernel)
YES(cuTensorMapEncodeTiled)
YES(cuMemsetD8Async)
