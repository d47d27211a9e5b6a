/* Shared declarations of the emulated GPU. One lock guards all of it. It is recursive, since work that runs
 * may call back into the runtime. */
#ifndef ARRAYBRIDGE_EMULATED_GPU_H
#define ARRAYBRIDGE_EMULATED_GPU_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_GPUS 8
#define GPU_NAME "Emulated Card (no hardware)"

typedef cudaError_t Status;

/* ---- settings, read from the environment when the library is loaded -------------------------------- */

typedef struct Settings {
    int gpus;       /* GPU_COUNT: how many there are, 2; after the first call, the visible ones */
    size_t capacity; /* GPU_MEMORY: bytes of each, 256 MiB */
    int lazy;        /* GPU_STREAMS=lazy or at-once: whether queued work waits until something forces it */
    int guarded;     /* GPU_GUARDED=1: the host must not access a GPU's memory */
    int trace;       /* GPU_TRACE=1: operations are written to stderr */
} Settings;

extern Settings settings;
extern pthread_mutex_t gpu_lock;
extern __thread int current_gpu;

#define LOCK() pthread_mutex_lock(&gpu_lock)
#define UNLOCK() pthread_mutex_unlock(&gpu_lock)

void trace_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Records the error for cudaGetLastError and returns it. */
Status fail(Status error);

/* An error that every later call returns: an illegal address, or a process that was forked too late. */
Status ruin(void);
void set_ruin(Status error);

/* Every call for which a real runtime calls cuInit first goes through this function. Returns 0 or the error. */
Status wake_driver(void);
int is_awake(void);
/* Also opens the GPU's primary context, as calls that allocate, queue or select do. */
Status open_gpu(int gpu);
int is_open(int gpu);

/* CUDA numbers the visible GPUs from 0 in the order of CUDA_VISIBLE_DEVICES, which it reads once, when the driver
 * is initialized. All tables of the emulation are indexed by CUDA's number. NVML, nvidia-smi, UUIDs and PCI
 * addresses use the physical number. */
int physical_number(int gpu);
int cuda_number(int physical); /* -1 for a GPU that is not visible, and before the driver is initialized */
int physical_count(void);
void read_uuid(int physical, unsigned char bytes[16]);
void print_uuid(int physical, char *out, size_t length);

/* ---- memory ----------------------------------------------------------------------------------------- */

typedef struct Pool {
    int gpu;
    int is_destroyed;
    size_t used, used_high, reserved, reserved_high;
    uint64_t threshold; /* bytes that the pool may retain beyond its use when a stream is synchronized */
} Pool;

typedef struct Block {
    char *address;  /* the address returned to the program */
    char *host;     /* where the emulation accesses the same bytes; differs only if they are guarded */
    size_t size, mapped;
    int gpu;
    enum cudaMemoryType kind;
    unsigned flags;
    int registered; /* the caller's own memory, pinned by cudaHostRegister */
    Pool *pool;     /* for memory that was allocated in stream order */
} Block;

Block *find_block(const void *address);
char *host_side(const void *address);
void make_memory_reachable(int reachable); /* for kernels, which use the addresses that programs use */
Status free_block(void *address, enum cudaMemoryType kind);
void trim_pools(int gpu);
size_t used_bytes(int gpu);
size_t count_blocks(enum cudaMemoryType kind);

/* ---- streams ---------------------------------------------------------------------------------------- */

typedef struct Launch Launch;
typedef struct Record Record;
typedef struct Queue Queue;

enum Kind { COPY, FILL, RECORD, WAIT, CALL, STATUS_CALL, FREE, KERNEL };

typedef struct Work {
    struct Work *next;
    enum Kind kind;
    char *to;
    const char *from;
    char *staged;                             /* pageable bytes, read when the copy was queued */
    size_t width, rows, to_pitch, from_pitch; /* rows is 0 for a copy in one piece */
    int value;
    Record *record;
    void (*call)(void *);
    void *argument;
    cudaStreamCallback_t status_call;
    Launch *launch;
} Work;

Queue *queue_of(cudaStream_t stream);
int gpu_of_queue(const Queue *queue);
Status submit(cudaStream_t stream, Work work);
Status finish_queue(cudaStream_t stream);
Status finish_gpu(int gpu);
size_t queued_work(int gpu);

/* ---- kernels ---------------------------------------------------------------------------------------- */

Status run_kernel(Launch *launch);
uint64_t launched_kernels(void);

#endif
