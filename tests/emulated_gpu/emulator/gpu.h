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
    int peers;       /* GPU_PEERS=0: no GPU can access the memory of another one */
    size_t context;  /* GPU_CONTEXT: bytes that a context occupies on its GPU, 16 MiB */
} Settings;

extern Settings settings;
extern pthread_mutex_t gpu_lock;

/* The GPU of the thread's current context, or the one that the runtime selected last if there is no context. */
int current_gpu(void);
/* A thread has a stack of contexts, which the driver API pushes and pops. The runtime replaces the context on top. */
int context_depth(void);
int top_context(void); /* -1 if the stack is empty */
Status push_context(int gpu);
int pop_context(void); /* the GPU of the context that was on top, or -1 */
void replace_context(int gpu);

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
/* As calls of the runtime do that need a context: opens the current GPU, and makes its context current. */
Status open_current(void);
int is_open(int gpu);
/* Whether a kernel on a GPU may access the memory of another one. */
int is_peer(int gpu, int other);

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
/* Before and after a kernel, which uses the addresses that programs use. It must not reach unconnected GPUs. */
void make_memory_reachable(int reachable, int gpu);
Status free_block(void *address, enum cudaMemoryType kind);
void trim_pools(int gpu);
size_t used_bytes(int gpu);     /* by allocations */
size_t occupied_bytes(int gpu); /* in blocks of 2 MiB, with the context */
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
    int owns_argument; /* of `call`, which is freed with the work */
    int is_replayed; /* work of a graph, which may run again */
} Work;

Queue *queue_of(cudaStream_t stream);
int gpu_of_queue(const Queue *queue);
Status submit(cudaStream_t stream, Work work);
/* The error of a call that is prohibited while a graph is captured, and which invalidates the capture. */
Status check_captures(void);
int exchange_capture_mode(int mode);
Status finish_queue(cudaStream_t stream);
Status finish_gpu(int gpu);
size_t queued_work(int gpu);

/* ---- kernels ---------------------------------------------------------------------------------------- */

Status run_kernel(Launch *launch, int gpu);
void drop_launch(Launch *launch);
uint64_t launched_kernels(void);

#endif
