/* The functions of the driver API and of NVML that the frameworks and arraybridge use, and the queries of the
 * tests about the emulation itself. */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- driver: its error numbers are those of the runtime ----------------------------------------------- */

int cuInit(unsigned flags) { return wake_driver(); }

int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* Unlike the runtime, the driver does not initialize itself. */
int cuDeviceGetCount(int *count) {
    *count = settings.gpus;
    return is_awake() ? ruin() : cudaErrorInitializationError;
}

int cuDeviceGet(int *gpu, int index) {
    if (!is_awake()) return cudaErrorInitializationError;
    if (index < 0 || index >= settings.gpus) return cudaErrorInvalidDevice;
    *gpu = index;
    return ruin();
}

int cuDeviceGetAttribute(int *value, int attribute, int gpu) { return cudaDeviceGetAttribute(value, attribute, gpu); }

int cuDeviceGetUuid(char *out, int gpu) {
    if (!is_awake()) return cudaErrorInitializationError;
    read_uuid(physical_number(gpu), (unsigned char *)out);
    return ruin();
}

int cuDeviceGetUuid_v2(char *out, int gpu) { return cuDeviceGetUuid(out, gpu); }
int cuDeviceCanAccessPeer(int *can, int gpu, int peer) { return cudaDeviceCanAccessPeer(can, gpu, peer); }
int cuDeviceGetPCIBusId(char *out, int length, int gpu) { return cudaDeviceGetPCIBusId(out, length, gpu); }

int cuDeviceGetName(char *out, int length, int gpu) {
    snprintf(out, (size_t)length, GPU_NAME);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *size, int gpu) {
    *size = settings.capacity;
    return 0;
}

int cuDevicePrimaryCtxGetState(int gpu, unsigned *flags, int *active) {
    *flags = 0;
    *active = is_open(gpu);
    return is_awake() ? ruin() : cudaErrorInitializationError;
}

/* A context's handle is the address of its number. */
static int contexts[MAX_GPUS];
static int retained[MAX_GPUS]; /* by cuDevicePrimaryCtxRetain only; the runtime's own use is not counted */

int cuDevicePrimaryCtxRetain(void **context, int gpu) {
    Status error = open_gpu(gpu);
    if (error) return error;
    *context = &contexts[gpu];
    LOCK();
    retained[gpu]++;
    UNLOCK();
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int gpu) {
    LOCK();
    int is_held = retained[gpu] > 0;
    if (is_held) retained[gpu]--;
    UNLOCK();
    return is_held ? 0 : cudaErrorDeviceUninitialized;
}

int cuDevicePrimaryCtxRelease(int gpu) { return cuDevicePrimaryCtxRelease_v2(gpu); }

enum { DRIVER_INVALID_CONTEXT = 201 };

static void *context_of(int gpu) { return gpu < 0 ? NULL : &contexts[gpu]; }

int cuCtxGetCurrent(void **context) {
    *context = context_of(top_context());
    return 0;
}

/* Replaces the context on top; NULL pops it. */
int cuCtxSetCurrent(void *context) {
    if (context) replace_context((int)((int *)context - contexts));
    else pop_context();
    return 0;
}

static int failing_pushes;
static __thread int pushed; /* contexts that were pushed and not popped */

int cuCtxPushCurrent_v2(void *context) {
    if (failing_pushes && failing_pushes--) return cudaErrorInvalidValue;
    int error = push_context((int)((int *)context - contexts));
    pushed += !error;
    return error;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!context_depth()) return DRIVER_INVALID_CONTEXT;
    *context = context_of(pop_context());
    pushed--;
    return 0;
}

int cuCtxGetDevice(int *gpu) {
    *gpu = top_context();
    return *gpu < 0 ? DRIVER_INVALID_CONTEXT : 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    *mode = exchange_capture_mode(*mode);
    return 0;
}

int cuGetErrorString(int code, const char **words) {
    *words = cudaGetErrorString(code);
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    *name = cudaGetErrorName(code);
    return 0;
}

int cuPointerGetAttribute(void *out, int attribute, unsigned long long address) {
    Block *block = find_block((void *)address);
    if (!block) return cudaErrorInvalidValue;
    switch (attribute) { /* numbers of CUpointer_attribute */
    case 1: *(void **)out = &contexts[block->gpu]; return 0;
    case 2: *(unsigned *)out = block->kind == cudaMemoryTypeHost ? 1 : 2; return 0;
    case 3: *(unsigned long long *)out = address; return 0;
    case 7: *(uint64_t *)out = (uint64_t)block->address; return 0;
    case 8: *(unsigned *)out = block->kind == cudaMemoryTypeManaged; return 0;
    case 9: *(int *)out = block->gpu; return 0;
    }
    return cudaErrorInvalidValue;
}

Status cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                        enum cudaDriverEntryPointQueryResult *result) {
    *out = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *out ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}

Status cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags,
                               enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, out, 13000, flags, result);
}

/* ---- NVML: it reports only this process, and never opens a GPU or initializes the driver ---------------- */
/* It ignores CUDA_VISIBLE_DEVICES: its numbers are the physical ones. */

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_TOO_SMALL = 7 };

static int gpus[MAX_GPUS]; /* a GPU's handle is the address of its number */

static int number_of(void *handle) { return (int)((int *)handle - gpus); }
static int gpu_of(void *handle) { return cuda_number(number_of(handle)); }

int nvmlInit_v2(void) { return NVML_SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return NVML_SUCCESS; }
int nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "an error of the emulated NVML" : "Success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)physical_count();
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= physical_count()) return NVML_INVALID;
    *handle = &gpus[index];
    return NVML_SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned length) {
    print_uuid(number_of(handle), out, length);
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int number = 0; number < physical_count(); number++) {
        char text[64];
        print_uuid(number, text, sizeof text);
        if (!strcmp(text, uuid)) {
            *handle = &gpus[number];
            return NVML_SUCCESS;
        }
    }
    return NVML_INVALID;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
    const char *known = strlen(address) > 12 ? address + 4 : address; /* NVML writes the domain in eight digits */
    for (int number = 0; number < physical_count(); number++) {
        char text[16];
        snprintf(text, sizeof text, "0000:%02X:00.0", 0x10 + number);
        if (!strcasecmp(text, known)) {
            *handle = &gpus[number];
            return NVML_SUCCESS;
        }
    }
    return NVML_INVALID;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned length) {
    snprintf(out, length, GPU_NAME);
    return NVML_SUCCESS;
}

typedef struct PciInfo { /* nvmlPciInfo_t */
    char legacy_id[16];
    unsigned domain, bus, device, pci_device_id, subsystem_id;
    char id[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *out) {
    memset(out, 0, sizeof *out);
    out->bus = 0x10u + (unsigned)number_of(handle);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus);
    snprintf(out->legacy_id, sizeof out->legacy_id, "0000:%02X:00.0", out->bus);
    return NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    int gpu = gpu_of(handle);
    unsigned long long taken = gpu < 0 ? 0 : occupied_bytes(gpu);
    out[0] = settings.capacity;
    out[1] = settings.capacity - taken;
    out[2] = taken;
    return NVML_SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) {
    out[0] = out[1] = 0; /* percent: idle between two calls */
    return NVML_SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    *out = 20;
    return NVML_SUCCESS;
}

int nvmlDeviceGetComputeMode(void *handle, int *mode) {
    *mode = 0; /* any number of processes */
    return NVML_SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = 8;
    *minor = 0;
    return NVML_SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "580.0 (emulated)");
    return NVML_SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_slice) {
    *is_slice = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) { return NVML_NOT_SUPPORTED; }

/* PyTorch looks these up before it reports an out-of-memory error. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *pci) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out) {
    *count = 0;
    return NVML_SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cuDriverGetVersion(version); }

typedef struct Process { /* nvmlProcessInfo_t */
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *out) {
    int gpu = gpu_of(handle);
    unsigned room = *count;
    *count = gpu >= 0 && is_open(gpu);
    if (!*count) return NVML_SUCCESS;
    if (!room || !out) return NVML_TOO_SMALL;
    out[0] = (Process){(unsigned)getpid(), occupied_bytes(gpu), 0, 0};
    return NVML_SUCCESS;
}

/* ---- queries of the tests (tests/emulated_gpu/accounting.py) ------------------------------------------ */

size_t gpu_used_bytes(int gpu) { return used_bytes(gpu); }
size_t gpu_capacity(void) { return settings.capacity; }
size_t gpu_queued_work(int gpu) { return queued_work(gpu); }
int gpu_is_open(int gpu) { return is_open(gpu); }
int gpu_is_lazy(void) { return settings.lazy; }
uint64_t gpu_launched_kernels(void) { return launched_kernels(); }
int gpu_is_awake(void) { return is_awake(); }
int gpu_retained_contexts(int gpu) { return retained[gpu]; }
int gpu_pushed_contexts(void) { return pushed; } /* of this thread, not popped so far */
void gpu_fail_next_push(void) { failing_pushes = 1; }
size_t gpu_pinned_blocks(void) { return count_blocks(cudaMemoryTypeHost); }
