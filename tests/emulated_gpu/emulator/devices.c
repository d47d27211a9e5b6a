/* Existing GPUs, the selected GPU, its context, and errors. */
#define _GNU_SOURCE
#include "gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Settings settings = {.gpus = 2, .capacity = (size_t)256 << 20, .lazy = 1, .peers = 1, .context = (size_t)16 << 20};
pthread_mutex_t gpu_lock;

static int is_gpu(int gpu) { return gpu >= 0 && gpu < settings.gpus; }

static __thread Status last_error;
static Status ruined;
static int awake, opened[MAX_GPUS];
static int physical[MAX_GPUS], physical_gpus; /* see read_visible */

static void make_lock(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&gpu_lock, &kind);
}

/* An initialized driver does not survive a fork: every call in the child fails, as with a real one. */
static void in_child(void) {
    make_lock();
    if (awake) ruined = cudaErrorInitializationError;
}

__attribute__((constructor)) static void start(void) {
    const char *text;
    make_lock();
    pthread_atfork(NULL, NULL, in_child);
    if ((text = getenv("GPU_COUNT"))) settings.gpus = atoi(text);
    if ((text = getenv("GPU_MEMORY"))) settings.capacity = strtoull(text, NULL, 0);
    if ((text = getenv("GPU_STREAMS"))) settings.lazy = strcmp(text, "at-once") != 0;
    if ((text = getenv("GPU_GUARDED"))) settings.guarded = atoi(text);
    if ((text = getenv("GPU_TRACE"))) settings.trace = atoi(text);
    if ((text = getenv("GPU_PEERS"))) settings.peers = atoi(text);
    if ((text = getenv("GPU_CONTEXT"))) settings.context = strtoull(text, NULL, 0);
    if (settings.gpus > MAX_GPUS) settings.gpus = MAX_GPUS;
    physical_gpus = settings.gpus;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) physical[gpu] = gpu;
}

void trace_line(const char *format, ...) {
    if (!settings.trace) return;
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "[gpu, thread %d] %s\n", gettid(), line);
}

Status fail(Status error) {
    if (error) last_error = error;
    return error;
}

Status ruin(void) { return ruined; }

void set_ruin(Status error) {
    if (!ruined) ruined = error;
}

/* ---- which GPUs are visible --------------------------------------------------------------------------- */

int physical_number(int gpu) { return physical[gpu]; }
int physical_count(void) { return physical_gpus; }

int cuda_number(int number) {
    if (!awake) return -1;
    for (int gpu = 0; gpu < settings.gpus; gpu++)
        if (physical[gpu] == number) return gpu;
    return -1;
}

/* nvidia-smi, in tools/, prints the same UUIDs. */
void read_uuid(int number, unsigned char bytes[16]) {
    for (int i = 0; i < 15; i++) bytes[i] = (unsigned char)(0xE0 + i);
    bytes[15] = (unsigned char)number;
}

void print_uuid(int number, char *out, size_t length) {
    unsigned char bytes[16];
    read_uuid(number, bytes);
    int used = snprintf(out, length, "GPU-");
    for (int i = 0; i < 16; i++)
        used += snprintf(out + used, length - (size_t)used, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

/* The GPU that an entry of CUDA_VISIBLE_DEVICES names: by its number, or by a UUID or the beginning of one that no
 * other GPU shares. -1 if it names none. */
static int named_gpu(const char *entry) {
    if (!*entry) return -1;
    if (strspn(entry, "0123456789") == strlen(entry)) {
        int number = atoi(entry);
        return number < physical_gpus ? number : -1;
    }
    int found = -1;
    for (int number = 0; number < physical_gpus; number++) {
        char uuid[64];
        print_uuid(number, uuid, sizeof uuid);
        if (strncmp(uuid, entry, strlen(entry))) continue;
        if (found >= 0) return -1;
        found = number;
    }
    return found;
}

/* Fills `physical` as CUDA does, and returns how many GPUs are visible: entries count up to the first that names no
 * GPU, and a GPU that is named twice hides all of them. */
static int read_visible(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) physical[gpu] = gpu;
    if (!text) return physical_gpus;
    int count = 0, seen[MAX_GPUS] = {0};
    char entries[1024], *rest = NULL;
    snprintf(entries, sizeof entries, "%s", text);
    for (char *entry = strtok_r(entries, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) {
        entry += strspn(entry, " ");
        entry[strcspn(entry, " ")] = 0;
        int number = named_gpu(entry);
        if (number < 0) break;
        if (seen[number]++) return 0;
        physical[count++] = number;
    }
    return count;
}

/* Without a visible GPU, the driver stays uninitialized, and the next call reads the variable again. */
Status wake_driver(void) {
    if (!awake) {
        LOCK();
        int count = awake ? settings.gpus : read_visible();
        if (count) settings.gpus = count;
        awake = count > 0;
        UNLOCK();
        if (!count) return fail(cudaErrorNoDevice);
    }
    return ruined ? fail(ruined) : cudaSuccess;
}

/* Also initializes the driver. */
static Status check_gpu(int gpu) {
    Status error = wake_driver();
    if (error) return error;
    return is_gpu(gpu) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

Status open_gpu(int gpu) {
    Status error = check_gpu(gpu);
    if (error) return error;
    if (opened[gpu]) return cudaSuccess;
    if (used_bytes(gpu) + settings.context > settings.capacity) return fail(cudaErrorMemoryAllocation);
    trace_line("context opened on gpu %d", gpu);
    opened[gpu] = 1;
    return cudaSuccess;
}

int is_open(int gpu) { return opened[gpu]; }
int is_awake(void) { return awake; }

/* The result of the generated stubs for calls that are not emulated. Only the runtime records errors. */
int gpu_unimplemented(const char *name) {
    trace_line("not emulated: %s", name);
    if (!strncmp(name, "cuda", 4)) last_error = cudaErrorNotSupported;
    return cudaErrorNotSupported;
}

/* ---- the current context ------------------------------------------------------------------------------- */

enum { MOST_CONTEXTS = 64 };
static __thread int selected_gpu; /* by the runtime */
static __thread int contexts[MOST_CONTEXTS], depth;

int current_gpu(void) { return depth ? contexts[depth - 1] : selected_gpu; }
int context_depth(void) { return depth; }
int top_context(void) { return depth ? contexts[depth - 1] : -1; }

Status push_context(int gpu) {
    if (depth == MOST_CONTEXTS) return cudaErrorInvalidValue;
    contexts[depth++] = gpu;
    return cudaSuccess;
}

int pop_context(void) { return depth ? contexts[--depth] : -1; }

void replace_context(int gpu) {
    if (!depth) depth = 1;
    contexts[depth - 1] = gpu;
}

/* ---- the runtime's calls ----------------------------------------------------------------------------- */

Status cudaGetDeviceCount(int *count) {
    *count = 0;
    Status error = wake_driver();
    if (error) return error;
    *count = settings.gpus;
    return cudaSuccess;
}

Status cudaGetDevice(int *gpu) {
    *gpu = current_gpu();
    return wake_driver();
}

/* Since CUDA 12, this call opens the GPU, and not only the first call that needs it. It replaces a context that the
 * driver API has pushed. */
Status cudaSetDevice(int gpu) {
    Status error = open_gpu(gpu);
    if (error) return error;
    trace_line("gpu %d selected", gpu);
    selected_gpu = gpu;
    replace_context(gpu);
    return cudaSuccess;
}

Status open_current(void) {
    int gpu = current_gpu();
    Status error = open_gpu(gpu);
    if (!error && !depth) replace_context(gpu);
    return error;
}

Status cudaInitDevice(int gpu, unsigned flags, unsigned more) { return open_gpu(gpu); }

Status cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    return cudaSuccess;
}

Status cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }

Status cudaDeviceSynchronize(void) {
    Status error = check_captures();
    return error ? error : finish_gpu(current_gpu());
}

Status cudaDeviceReset(void) {
    Status error = finish_gpu(current_gpu());
    opened[current_gpu()] = 0;
    return error;
}

Status cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

Status cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

Status cudaGetLastError(void) {
    Status error = last_error;
    last_error = cudaSuccess;
    return error;
}

Status cudaPeekAtLastError(void) { return last_error; }

static unsigned char peers[MAX_GPUS][MAX_GPUS];

Status cudaDeviceCanAccessPeer(int *can, int gpu, int peer) {
    if (check_gpu(gpu) || check_gpu(peer)) return cudaErrorInvalidDevice;
    *can = gpu != peer && settings.peers;
    return cudaSuccess;
}

Status cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    if (check_gpu(peer) || peer == current_gpu()) return fail(cudaErrorInvalidDevice);
    if (!settings.peers) return fail(cudaErrorPeerAccessUnsupported);
    if (peers[current_gpu()][peer]) return fail(cudaErrorPeerAccessAlreadyEnabled);
    peers[current_gpu()][peer] = 1;
    return open_current();
}

int is_peer(int gpu, int other) { return gpu == other || peers[gpu][other]; }

Status cudaDeviceDisablePeerAccess(int peer) {
    if (!is_gpu(peer) || !peers[current_gpu()][peer]) return fail(cudaErrorPeerAccessNotEnabled);
    peers[current_gpu()][peer] = 0;
    return cudaSuccess;
}

Status cudaDeviceGetPCIBusId(char *text, int length, int gpu) {
    Status error = check_gpu(gpu);
    if (error) return error;
    snprintf(text, length, "0000:%02X:00.0", 0x10 + physical_number(gpu));
    return cudaSuccess;
}

Status cudaDeviceGetByPCIBusId(int *gpu, const char *text) {
    Status error = wake_driver();
    if (error) return error;
    for (int i = 0; i < settings.gpus; i++) {
        char known[16];
        cudaDeviceGetPCIBusId(known, sizeof known, i);
        if (!strcasecmp(known, text) || !strcasecmp(known + 5, text)) {
            *gpu = i;
            return cudaSuccess;
        }
    }
    return fail(cudaErrorInvalidDevice);
}

/* A GPU of compute capability 8.0. */
Status cudaGetDeviceProperties(struct cudaDeviceProp *p, int gpu) {
    Status error = check_gpu(gpu);
    if (error) return error;
    memset(p, 0, sizeof *p);
    strcpy(p->name, GPU_NAME);
    read_uuid(physical_number(gpu), (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = settings.capacity;
    p->sharedMemPerBlock = 49152;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = 8;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->multiProcessorCount = 4;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
    p->concurrentManagedAccess = p->cooperativeLaunch = p->hostRegisterSupported = 1;
    p->memoryPoolsSupported = p->streamPrioritiesSupported = 1;
    p->pciBusID = 0x10 + physical_number(gpu);
    p->asyncEngineCount = 2;
    p->memoryBusWidth = 512;
    p->l2CacheSize = 1 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 167936;
    p->sharedMemPerBlockOptin = 166912;
    p->maxBlocksPerMultiProcessor = 32;
    return cudaSuccess;
}

Status cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int gpu) {
    struct cudaDeviceProp p;
    Status error = cudaGetDeviceProperties(&p, gpu);
    if (error) return error;
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

Status cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) {
    *value = 1 << 20;
    return cudaSuccess;
}

Status cudaDeviceSetLimit(enum cudaLimit limit, size_t value) { return cudaSuccess; }
Status cudaProfilerStart(void) { return cudaSuccess; }
Status cudaProfilerStop(void) { return cudaSuccess; }

/* Frameworks recognize errors by these texts. */
static const struct {
    Status code;
    const char *name, *words;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
};

const char *cudaGetErrorName(Status code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return "cudaErrorUnknown";
}

const char *cudaGetErrorString(Status code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].words;
    return "unknown error";
}
