/* A CUDA runtime that says yes: for what a program does on the host's side of a GPU, where there is none.

   Loaded before libcudart, libcublas and libnccl (LD_PRELOAD).  Device memory is the host's, and stays zero;
   kernels, products and collectives do nothing; streams and events are numbers.  So it finds exceptions, waits of the
   host and hangs, and no wrong value.

   FAKE_GPUS: how many there are (1).  FAKE_GPU_HANGS_AFTER=N: after N waits for events no event comes any more.
   FAKE_GPU_REFUSES_LOCKING: host memory cannot be registered. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver_types.h"

enum { SUCCESS = 0, NO_MEMORY = 2, NOT_READY = 600 };
enum { UNKNOWN = 0, HOST = 1, DEVICE = 2 };
static const size_t TOTAL = 140UL << 30;

/* ---- memory: which addresses are whose ---- */

struct block {
    char *start;
    size_t size;
    int kind;
    struct block *next;
};
static struct block *blocks;
static size_t in_use;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(void *start, size_t size, int kind) {
    struct block *block = malloc(sizeof *block);
    pthread_mutex_lock(&lock);
    *block = (struct block){start, size, kind, blocks};
    blocks = block;
    in_use += kind == DEVICE ? size : 0;
    pthread_mutex_unlock(&lock);
}

static int forget(void *start) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct block **link = &blocks; *link; link = &(*link)->next)
        if ((*link)->start == start) {
            struct block *gone = *link;
            in_use -= gone->kind == DEVICE ? gone->size : 0;
            *link = gone->next;
            free(gone);
            found = 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static int kind_of(const void *address) {
    int kind = UNKNOWN;
    pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block && kind == UNKNOWN; block = block->next)
        if ((char *)address >= block->start && (char *)address < block->start + block->size) kind = block->kind;
    pthread_mutex_unlock(&lock);
    return kind;
}

static int allocate(void **out, size_t size, int kind) {
    if (kind == DEVICE && in_use + size > TOTAL) return NO_MEMORY;
    if (posix_memalign(out, 4096, size ? size : 1)) return NO_MEMORY;
    memset(*out, 0, size);
    note(*out, size, kind);
    return SUCCESS;
}

static int release(void *start) {
    if (start && forget(start)) free(start);
    return SUCCESS;
}

int cudaMalloc(void **out, size_t size) { return allocate(out, size, DEVICE); }
int cudaMallocAsync(void **out, size_t size, void *stream) { return allocate(out, size, DEVICE); }
int cudaFree(void *start) { return release(start); }
int cudaFreeAsync(void *start, void *stream) { return release(start); }
int cudaHostAlloc(void **out, size_t size, unsigned flags) { return allocate(out, size, HOST); }
int cudaMallocHost(void **out, size_t size) { return allocate(out, size, HOST); }
int cudaFreeHost(void *start) { return release(start); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) { return *total = TOTAL, *free_bytes = TOTAL - in_use, SUCCESS; }
int cudaHostRegister(void *start, size_t size, unsigned flags) {
    if (getenv("FAKE_GPU_REFUSES_LOCKING")) return NO_MEMORY;
    return note(start, size, HOST), SUCCESS;
}
int cudaHostUnregister(void *start) { return forget(start) ? SUCCESS : 713; /* cudaErrorHostMemoryNotRegistered */ }
int cudaHostGetDevicePointer(void **out, void *start, unsigned flags) { return *out = start, SUCCESS; }
static int copy(void *to, const void *from, size_t size) {
    if (kind_of(to) != DEVICE) memmove(to, from, size); /* what is on a device stays zero */
    return SUCCESS;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size); }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size); }
int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, void *stream) {
    return copy(to, from, size);
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return SUCCESS;
}
int cudaMemsetAsync(void *start, int value, size_t size, void *stream) { return SUCCESS; }
int cudaMemset(void *start, int value, size_t size) { return SUCCESS; }
int cudaGetSymbolAddress(void **out, const void *symbol) { return *out = calloc(1, 1 << 16), SUCCESS; }

/* ---- devices ---- */

static __thread int current;

int cudaGetDeviceCount(int *count) {
    const char *wanted = getenv("FAKE_GPUS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    int given = wanted ? atoi(wanted) : 1, named = visible && *visible;
    for (const char *at = visible; at && *at; at++) named += *at == ',' && at[1];
    *count = visible && named < given ? named : given;
    return *count ? SUCCESS : 100; /* cudaErrorNoDevice */
}
int cudaGetDevice(int *device) { return *device = current, SUCCESS; }
int cudaSetDevice(int device) { return current = device, SUCCESS; }
int cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    memset(is, 0, sizeof *is);
    strcpy(is->name, "NVIDIA H200");
    is->uuid.bytes[0] = 1 + (visible && visible[0] >= '0' && !visible[1] ? visible[0] - '0' : device);
    is->major = 9;
    is->multiProcessorCount = 132;
    is->totalGlobalMem = TOTAL;
    is->warpSize = 32;
    is->sharedMemPerBlock = 48 << 10;
    is->sharedMemPerBlockOptin = 227 << 10;
    is->sharedMemPerMultiprocessor = 228 << 10;
    is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024;
    is->maxThreadsDim[2] = 64;
    is->maxThreadsPerMultiProcessor = 2048;
    is->maxBlocksPerMultiProcessor = 32;
    is->maxGridSize[0] = 2147483647;
    is->maxGridSize[1] = is->maxGridSize[2] = 65535;
    is->regsPerMultiprocessor = is->regsPerBlock = 65536;
    is->l2CacheSize = 60 << 20;
    return SUCCESS;
}
int cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp is;
    cudaGetDeviceProperties(&is, device);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return *value = is.major, SUCCESS;
    case cudaDevAttrMultiProcessorCount: return *value = is.multiProcessorCount, SUCCESS;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return *value = is.maxThreadsPerMultiProcessor, SUCCESS;
    case cudaDevAttrMaxThreadsPerBlock: return *value = is.maxThreadsPerBlock, SUCCESS;
    case cudaDevAttrMaxSharedMemoryPerBlock: return *value = (int)is.sharedMemPerBlock, SUCCESS;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = (int)is.sharedMemPerBlockOptin, SUCCESS;
    case cudaDevAttrWarpSize: return *value = is.warpSize, SUCCESS;
    case cudaDevAttrMaxRegistersPerBlock: return *value = is.regsPerBlock, SUCCESS;
    case cudaDevAttrL2CacheSize: return *value = is.l2CacheSize, SUCCESS;
    case cudaDevAttrMaxGridDimX: return *value = is.maxGridSize[0], SUCCESS;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return *value = is.maxGridSize[1], SUCCESS;
    default: return *value = 0, SUCCESS;
    }
}
int cudaDeviceCanAccessPeer(int *can, int device, int other) { return *can = 0, SUCCESS; }
int cudaDeviceGetPCIBusId(char *out, int size, int device) {
    strncpy(out, "0000:01:00.0", (size_t)size);
    out[6] = (char)('1' + device);
    return SUCCESS;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *is, const void *address) {
    int kind = kind_of(address);
    memset(is, 0, sizeof *is);
    is->type = (enum cudaMemoryType)kind;
    is->device = current;
    is->devicePointer = kind ? (void *)address : NULL;
    is->hostPointer = kind == HOST ? (void *)address : NULL;
    return SUCCESS;
}

/* ---- streams, events, handles ---- */

static int hand_out(void **out) {
    static long last = 4096;
    *out = (void *)__sync_add_and_fetch(&last, 16);
    return SUCCESS;
}
#define HANDLE(name) \
    int name(void **out, ...) { return hand_out(out); }
HANDLE(cudaStreamCreate)
HANDLE(cudaStreamCreateWithFlags)
HANDLE(cudaStreamCreateWithPriority)
HANDLE(cudaEventCreate)
HANDLE(cudaEventCreateWithFlags)
HANDLE(cudaDeviceGetDefaultMemPool)
HANDLE(cublasCreate_v2)
HANDLE(cublasLtCreate)
HANDLE(ncclCommInitRank)
HANDLE(ncclCommInitRankConfig)
HANDLE(ncclCommInitRankScalable)

int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
#define CAPTURE(name) \
    int name(void *stream, int *status, unsigned long long *id, ...) { return *status = 0, id ? *id = 0 : 0, SUCCESS; }
CAPTURE(cudaStreamGetCaptureInfo)
CAPTURE(cudaStreamGetCaptureInfo_v2)
CAPTURE(cudaStreamGetCaptureInfo_v3)

static int waits;
static int hangs(void) {
    const char *limit = getenv("FAKE_GPU_HANGS_AFTER");
    return limit && waits >= atoi(limit);
}
static char came[1 << 20]; /* events that have been found to have come, until they are recorded again */
static char *of(void *event) { return &came[((size_t)event / 16) % sizeof came]; }
static int record(void *event) { return *of(event) = 0, SUCCESS; }
int cudaEventRecord(void *event, void *stream) { return record(event); }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return record(event); }
int cudaEventQuery(void *event) { return *of(event) || !hangs() ? *of(event) = 1, SUCCESS : NOT_READY; }
int cudaEventSynchronize(void *event) {
    while (cudaEventQuery(event) == NOT_READY) sleep(1);
    __sync_add_and_fetch(&waits, 1);
    return SUCCESS;
}
int cudaEventElapsedTime(float *ms, void *start, void *end) { return *ms = 1.0f, SUCCESS; }
int cudaEventElapsedTime_v2(float *ms, void *start, void *end) { return *ms = 1.0f, SUCCESS; }
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return function(data), SUCCESS; }

/* ---- kernels ---- */

int cudaFuncGetAttributes(struct cudaFuncAttributes *is, const void *function) {
    memset(is, 0, sizeof *is);
    is->maxThreadsPerBlock = 1024;
    is->binaryVersion = is->ptxVersion = 90;
    is->numRegs = 32;
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, ...) { return *count = 2, SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, ...) { return *count = 2, SUCCESS; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    return *found = 1, SUCCESS;
}

/* ---- NCCL: its calls return at once, and what is sent goes nowhere ---- */

int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }
int ncclGetUniqueId(void *id) { return memset(id, 7, 128), SUCCESS; }
int ncclCommSplit(void *group, int color, int key, void **out, void *options) { return hand_out(out); }
int ncclCommGetAsyncError(void *group, int *error) { return *error = 0, SUCCESS; }
int ncclCommCount(void *group, int *count) { return *count = 1, SUCCESS; }
int ncclCommUserRank(void *group, int *rank) { return *rank = 0, SUCCESS; }
int ncclCommCuDevice(void *group, int *device) { return *device = current, SUCCESS; }
const char *ncclGetErrorString(int error) { return "none"; }
const char *ncclGetLastError(void *group) { return ""; }

#define YES(name) \
    int name() { return SUCCESS; }
YES(cudaGetLastError)
YES(cudaPeekAtLastError)
YES(cudaDeviceSynchronize)
YES(cudaDeviceReset)
YES(cudaStreamSynchronize)
YES(cudaStreamQuery)
YES(cudaStreamDestroy)
YES(cudaStreamWaitEvent)
YES(cudaEventDestroy)
YES(cudaMemcpyToSymbolAsync)
YES(cudaMemPoolSetAttribute)
YES(cudaLaunchKernel)
YES(cudaLaunchKernelExC)
YES(cudaLaunchCooperativeKernel)
YES(cudaFuncSetAttribute)
YES(cudaFuncSetCacheConfig)
YES(cudaProfilerStart)
YES(cudaProfilerStop)
YES(cudaIpcGetMemHandle)
YES(cublasDestroy_v2)
YES(cublasSetStream_v2)
YES(cublasSetWorkspace_v2)
YES(cublasSetMathMode)
YES(cublasSetPointerMode_v2)
YES(cublasSetEmulationStrategy)
YES(cublasSgemm_v2)
YES(cublasDgemm_v2)
YES(cublasGemmEx)
YES(cublasGemmStridedBatchedEx)
YES(cublasSgemmStridedBatched)
YES(cublasSgemv_v2)
YES(cublasSdot_v2)
YES(cublasDotEx)
YES(cublasLtMatmul)
YES(ncclCommFinalize)
YES(ncclCommDestroy)
YES(ncclCommAbort)
YES(ncclCommRegister)
YES(ncclCommDeregister)
YES(ncclCommDump)
YES(ncclGroupStart)
YES(ncclGroupEnd)
YES(ncclAllReduce)
YES(ncclBroadcast)
YES(ncclBcast)
YES(ncclAllGather)
YES(ncclReduceScatter)
YES(ncclSend)
YES(ncclRecv)
YES(ncclAlltoAll)
