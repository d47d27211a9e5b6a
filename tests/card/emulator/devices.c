/* Which cards there are, which is selected, whether a context is open, and errors. */
#define _GNU_SOURCE
#include "card.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Settings settings = {.cards = 2, .capacity = (size_t)256 << 20, .lazy = 1};
pthread_mutex_t card_lock;
__thread int current_card;

static __thread Status last_error;
static Status ruined;
static int awake, opened[MAX_CARDS];

static void make_lock(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&card_lock, &kind);
}

/* A driver that was woken does not survive a fork: every call in the child fails, as with a real one. */
static void in_child(void) {
    make_lock();
    if (awake) ruined = cudaErrorInitializationError;
}

__attribute__((constructor)) static void start(void) {
    const char *text;
    make_lock();
    pthread_atfork(NULL, NULL, in_child);
    if ((text = getenv("CARD_COUNT"))) settings.cards = atoi(text);
    if ((text = getenv("CARD_MEMORY"))) settings.capacity = strtoull(text, NULL, 0);
    if ((text = getenv("CARD_STREAMS"))) settings.lazy = strcmp(text, "at-once") != 0;
    if ((text = getenv("CARD_GUARDED"))) settings.guarded = atoi(text);
    if ((text = getenv("CARD_TRACE"))) settings.trace = atoi(text);
    if (settings.cards > MAX_CARDS) settings.cards = MAX_CARDS;
}

void trace_line(const char *format, ...) {
    if (!settings.trace) return;
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "[card, thread %d] %s\n", gettid(), line);
}

Status fail(Status error) {
    if (error) last_error = error;
    return error;
}

Status ruin(void) { return ruined; }

void set_ruin(Status error) {
    if (!ruined) ruined = error;
}

Status wake_driver(void) {
    awake = 1;
    return ruined ? fail(ruined) : cudaSuccess;
}

Status open_card(int card) {
    Status error = wake_driver();
    if (error) return error;
    if (!opened[card]) trace_line("context opened on card %d", card);
    opened[card] = 1;
    return cudaSuccess;
}

int is_open(int card) { return opened[card]; }
int is_awake(void) { return awake; }

/* What the generated stubs of every call that is not emulated answer. */
int card_unimplemented(const char *name) {
    trace_line("not emulated: %s", name);
    last_error = cudaErrorNotSupported;
    return cudaErrorNotSupported;
}

/* ---- the runtime's calls ----------------------------------------------------------------------------- */

static int is_card(int card) { return card >= 0 && card < settings.cards; }

Status cudaGetDeviceCount(int *count) {
    *count = 0;
    Status error = wake_driver();
    if (error) return error;
    *count = settings.cards;
    return settings.cards ? cudaSuccess : fail(cudaErrorNoDevice);
}

Status cudaGetDevice(int *card) {
    *card = current_card;
    return wake_driver();
}

/* Since CUDA 12 this opens the card, and not only the first call that needs it. */
Status cudaSetDevice(int card) {
    if (!is_card(card)) return fail(cudaErrorInvalidDevice);
    Status error = open_card(card);
    if (!error) current_card = card;
    return error;
}

Status cudaInitDevice(int card, unsigned flags, unsigned more) {
    return is_card(card) ? open_card(card) : fail(cudaErrorInvalidDevice);
}

Status cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    return cudaSuccess;
}

Status cudaSetDeviceFlags(unsigned flags) { return cudaSuccess; }

Status cudaDeviceSynchronize(void) { return finish_card(current_card); }

Status cudaDeviceReset(void) {
    Status error = finish_card(current_card);
    opened[current_card] = 0;
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

static unsigned char peers[MAX_CARDS][MAX_CARDS];

Status cudaDeviceCanAccessPeer(int *can, int card, int peer) {
    if (!is_card(card) || !is_card(peer)) return fail(cudaErrorInvalidDevice);
    *can = card != peer;
    return cudaSuccess;
}

Status cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    if (!is_card(peer) || peer == current_card) return fail(cudaErrorInvalidDevice);
    if (peers[current_card][peer]) return fail(cudaErrorPeerAccessAlreadyEnabled);
    peers[current_card][peer] = 1;
    return open_card(current_card);
}

Status cudaDeviceDisablePeerAccess(int peer) {
    if (!is_card(peer) || !peers[current_card][peer]) return fail(cudaErrorPeerAccessNotEnabled);
    peers[current_card][peer] = 0;
    return cudaSuccess;
}

Status cudaDeviceGetPCIBusId(char *text, int length, int card) {
    if (!is_card(card)) return fail(cudaErrorInvalidDevice);
    snprintf(text, length, "0000:%02X:00.0", 0x10 + card);
    return cudaSuccess;
}

Status cudaDeviceGetByPCIBusId(int *card, const char *text) {
    for (int i = 0; i < settings.cards; i++) {
        char known[16];
        cudaDeviceGetPCIBusId(known, sizeof known, i);
        if (!strcasecmp(known, text) || !strcasecmp(known + 5, text)) {
            *card = i;
            return cudaSuccess;
        }
    }
    return fail(cudaErrorInvalidDevice);
}

/* A card of compute capability 8.0; nvidia-smi, in tools/, prints the same UUID. */
Status cudaGetDeviceProperties(struct cudaDeviceProp *p, int card) {
    if (!is_card(card)) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, CARD_NAME);
    for (int i = 0; i < 15; i++) p->uuid.bytes[i] = (char)(0xE0 + i);
    p->uuid.bytes[15] = (char)card;
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
    p->pciBusID = 0x10 + card;
    p->asyncEngineCount = 2;
    p->memoryBusWidth = 512;
    p->l2CacheSize = 1 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerMultiprocessor = 167936;
    p->sharedMemPerBlockOptin = 166912;
    p->maxBlocksPerMultiProcessor = 32;
    return cudaSuccess;
}

Status cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int card) {
    struct cudaDeviceProp p;
    Status error = cudaGetDeviceProperties(&p, card);
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

/* Frameworks recognise errors by these words. */
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
