/* The little of the driver's interface and of NVML that the frameworks and arraybridge ask, and what the tests ask
 * of the emulation itself. */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- driver: numbers of its errors are those of the runtime ------------------------------------------- */

int cuInit(unsigned flags) { return wake_driver(); }

int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* Unlike the runtime, the driver does not wake up by itself. */
int cuDeviceGetCount(int *count) {
    *count = settings.cards;
    return is_awake() ? ruin() : cudaErrorInitializationError;
}

int cuDeviceGet(int *card, int index) {
    if (!is_awake()) return cudaErrorInitializationError;
    if (index < 0 || index >= settings.cards) return cudaErrorInvalidDevice;
    *card = index;
    return ruin();
}

int cuDeviceGetAttribute(int *value, int attribute, int card) { return cudaDeviceGetAttribute(value, attribute, card); }

int cuDeviceGetUuid(char *out, int card) {
    if (!is_awake()) return cudaErrorInitializationError;
    read_uuid(physical_number(card), (unsigned char *)out);
    return ruin();
}

int cuDeviceGetUuid_v2(char *out, int card) { return cuDeviceGetUuid(out, card); }
int cuDeviceGetPCIBusId(char *out, int length, int card) { return cudaDeviceGetPCIBusId(out, length, card); }

int cuDeviceGetName(char *out, int length, int card) {
    snprintf(out, (size_t)length, CARD_NAME);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *size, int card) {
    *size = settings.capacity;
    return 0;
}

int cuDevicePrimaryCtxGetState(int card, unsigned *flags, int *active) {
    *flags = 0;
    *active = is_open(card);
    return is_awake() ? ruin() : cudaErrorInitializationError;
}

/* A context's handle is the address of its number. */
static int contexts[MAX_CARDS];
static int retained[MAX_CARDS]; /* by cuDevicePrimaryCtxRetain alone; the runtime's own use is not counted */

int cuDevicePrimaryCtxRetain(void **context, int card) {
    Status error = open_card(card);
    if (error) return error;
    *context = &contexts[card];
    LOCK();
    retained[card]++;
    UNLOCK();
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int card) {
    LOCK();
    int is_held = retained[card] > 0;
    if (is_held) retained[card]--;
    UNLOCK();
    return is_held ? 0 : cudaErrorDeviceUninitialized;
}

int cuDevicePrimaryCtxRelease(int card) { return cuDevicePrimaryCtxRelease_v2(card); }

int cuCtxGetCurrent(void **context) {
    *context = is_open(current_card) ? &contexts[current_card] : NULL;
    return 0;
}

int cuCtxSetCurrent(void *context) {
    if (context) current_card = (int)((int *)context - contexts);
    return 0;
}

static __thread int before[64], depth; /* cards that were current when a context was pushed */
static int failing_pushes;

int cuCtxPushCurrent_v2(void *context) {
    if (failing_pushes && failing_pushes--) return cudaErrorInvalidValue;
    if (depth == 64) return cudaErrorInvalidValue;
    before[depth++] = current_card;
    return cuCtxSetCurrent(context);
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return cudaErrorInvalidValue;
    *context = &contexts[current_card];
    current_card = before[--depth];
    return 0;
}

int cuCtxGetDevice(int *card) {
    *card = current_card;
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
    case 1: *(void **)out = &contexts[block->card]; return 0;
    case 2: *(unsigned *)out = block->kind == cudaMemoryTypeHost ? 1 : 2; return 0;
    case 3: *(unsigned long long *)out = address; return 0;
    case 7: *(uint64_t *)out = (uint64_t)block->address; return 0;
    case 8: *(unsigned *)out = block->kind == cudaMemoryTypeManaged; return 0;
    case 9: *(int *)out = block->card; return 0;
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

/* ---- NVML: it sees this process alone, and never opens a card or wakes the driver ------------------------ */
/* It knows nothing of CUDA_VISIBLE_DEVICES: its numbers are the physical ones. */

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_TOO_SMALL = 7 };

static int gpus[MAX_CARDS]; /* a GPU's handle is the address of its number */

static int number_of(void *handle) { return (int)((int *)handle - gpus); }
static int card_of(void *handle) { return cuda_number(number_of(handle)); }

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
    snprintf(out, length, CARD_NAME);
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
    int card = card_of(handle);
    unsigned long long taken = card < 0 ? 0 : used_bytes(card);
    out[0] = settings.capacity;
    out[1] = settings.capacity - taken;
    out[2] = taken;
    return NVML_SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *out) {
    out[0] = out[1] = 0; /* percent: it does nothing between two calls */
    return NVML_SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    *out = 20;
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

/* torch looks these up before it says that memory has run out. */
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
    int card = card_of(handle);
    unsigned room = *count;
    *count = card >= 0 && is_open(card);
    if (!*count) return NVML_SUCCESS;
    if (!room || !out) return NVML_TOO_SMALL;
    out[0] = (Process){(unsigned)getpid(), used_bytes(card), 0, 0};
    return NVML_SUCCESS;
}

/* ---- what the tests ask (tests/emulated_gpu/accounting.py) ------------------------------------------------------------ */

size_t card_used_bytes(int card) { return used_bytes(card); }
size_t card_capacity(void) { return settings.capacity; }
size_t card_queued_work(int card) { return queued_work(card); }
int card_is_open(int card) { return is_open(card); }
int card_is_lazy(void) { return settings.lazy; }
uint64_t card_launched_kernels(void) { return launched_kernels(); }
int card_is_awake(void) { return is_awake(); }
int card_retained_contexts(int card) { return retained[card]; }
int card_pushed_contexts(void) { return depth; } /* of this thread, and not popped as yet */
void card_fail_next_push(void) { failing_pushes = 1; }
size_t card_pinned_blocks(void) { return count_blocks(cudaMemoryTypeHost); }
