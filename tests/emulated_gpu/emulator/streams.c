/* Streams, which run their work as late as possible, and events.
 *
 * A real GPU runs work soon, so a missing wait is almost never detected. Here,
 * work does not run until something forces it: a host that waits, or a stream that waits for another. Work
 * that was not ordered then reads old bytes every time. The default stream is as lazy as the others. It waits for
 * the blocking streams and they for it, as the runtime's documentation states. */
#define _GNU_SOURCE
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { QUEUE_MAGIC = 0x57EA, EVENT_MAGIC = 0xE7E7 };

struct Queue {
    int magic, gpu, priority, polls;
    unsigned flags;
    unsigned long long id;
    Work *head, *tail;
    Queue *next;
};

/* A point in a stream. Events and waits refer to it, even after the event was recorded again elsewhere. */
struct Record {
    int references, is_done, polls;
    Queue *queue;
    struct timespec time;
};

typedef struct Event {
    int magic, gpu;
    unsigned flags;
    Record *last;
} Event;

static Queue *queues, defaults[MAX_GPUS];
static unsigned long long next_id = 3;

static void release(Record *record) {
    if (record && !--record->references) free(record);
}

/* ---- running work ------------------------------------------------------------------------------------ */

static Status run_until(Queue *queue, Record *record);

static void copy_now(Work *work) {
    char *to = host_side(work->to);
    const char *from = host_side(work->from);
    if (!work->rows) memmove(to, from, work->width);
    else
        for (size_t row = 0; row < work->rows; row++)
            memmove(to + row * work->to_pitch, from + row * work->from_pitch, work->width);
    free(work->staged);
}

static Status carry_out(Queue *queue, Work *work) {
    switch (work->kind) {
    case COPY: copy_now(work); break;
    case FILL: memset(host_side(work->to), work->value, work->width); break;
    case RECORD:
        work->record->is_done = 1;
        clock_gettime(CLOCK_MONOTONIC, &work->record->time);
        release(work->record);
        break;
    case WAIT: {
        Status error = work->record->is_done ? cudaSuccess : run_until(work->record->queue, work->record);
        release(work->record);
        return error;
    }
    case CALL: work->call(work->argument); break;
    case STATUS_CALL: work->status_call((cudaStream_t)queue, cudaSuccess, work->argument); break;
    case FREE: return free_block(work->to, cudaMemoryTypeDevice);
    case KERNEL: return run_kernel(work->launch);
    }
    return cudaSuccess;
}

/* Runs the stream up to that record, or all of it for NULL. */
static Status run_until(Queue *queue, Record *record) {
    while (queue->head && !(record && record->is_done)) {
        Work *work = queue->head;
        queue->head = work->next;
        if (!queue->head) queue->tail = NULL;
        Status error = ruin() ? ruin() : carry_out(queue, work);
        free(work);
        if (error) return fail(error);
    }
    return ruin();
}

static void append(Queue *queue, Work work) {
    Work *own = malloc(sizeof *own);
    *own = work;
    own->next = NULL;
    if (queue->tail) queue->tail->next = own;
    else queue->head = own;
    queue->tail = own;
    queue->polls = 0;
}

static Record *record_on(Queue *queue) {
    Record *record = calloc(1, sizeof *record);
    record->queue = queue;
    record->references = 2; /* references of the caller and of the stream */
    append(queue, (Work){.kind = RECORD, .record = record});
    return record;
}

static void wait_for(Queue *queue, Queue *other) {
    if (other->head) append(queue, (Work){.kind = WAIT, .record = record_on(other)});
}

/* ---- selecting a stream ------------------------------------------------------------------------------ */

static int is_default(cudaStream_t stream) {
    return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

Queue *queue_of(cudaStream_t stream) {
    if (!is_default(stream)) return (Queue *)stream;
    Queue *queue = &defaults[current_gpu];
    queue->magic = QUEUE_MAGIC;
    queue->gpu = current_gpu;
    queue->id = 1;
    return queue;
}

int gpu_of_queue(const Queue *queue) { return queue->gpu; }

static int is_blocking(const Queue *queue) { return !(queue->flags & cudaStreamNonBlocking); }

/* The default stream and the blocking streams wait for each other. */
static void take_turns(Queue *queue) {
    Queue *first = &defaults[queue->gpu];
    if (queue == first) {
        for (Queue *other = queues; other; other = other->next)
            if (other->gpu == queue->gpu && is_blocking(other)) wait_for(queue, other);
    } else if (is_blocking(queue)) {
        wait_for(queue, first);
    }
}

Status submit(cudaStream_t stream, Work work) {
    LOCK();
    Queue *queue = queue_of(stream);
    Status error = queue->magic == QUEUE_MAGIC ? open_gpu(queue->gpu) : cudaErrorInvalidResourceHandle;
    if (!error) {
        trace_line("queue %llu of gpu %d: work %d, %zu bytes from %p to %p", queue->id, queue->gpu, work.kind,
                   work.width, (const void *)work.from, (void *)work.to);
        take_turns(queue);
        append(queue, work);
        /* An error there is returned by the next call, as on a GPU. */
        if (!settings.lazy) run_until(queue, NULL);
    }
    UNLOCK();
    return fail(error);
}

Status finish_queue(cudaStream_t stream) {
    LOCK();
    Queue *queue = queue_of(stream);
    Status error = queue->magic == QUEUE_MAGIC ? open_gpu(queue->gpu) : cudaErrorInvalidResourceHandle;
    if (!error) {
        take_turns(queue);
        error = run_until(queue, NULL);
        trim_pools(queue->gpu);
    }
    UNLOCK();
    return fail(error);
}

Status finish_gpu(int gpu) {
    LOCK();
    Status error = open_gpu(gpu);
    for (Queue *queue = queues; queue && !error; queue = queue->next)
        if (queue->gpu == gpu) error = run_until(queue, NULL);
    if (!error) error = run_until(&defaults[gpu], NULL);
    trim_pools(gpu);
    UNLOCK();
    return fail(error);
}

size_t queued_work(int gpu) {
    size_t count = 0;
    LOCK();
    for (Queue *queue = queues; queue; queue = queue->next)
        for (Work *work = queue->gpu == gpu ? queue->head : NULL; work; work = work->next) count++;
    for (Work *work = defaults[gpu].head; work; work = work->next) count++;
    UNLOCK();
    return count;
}

/* ---- streams ----------------------------------------------------------------------------------------- */

Status cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    Status error = open_gpu(current_gpu);
    if (error) return error;
    Queue *queue = calloc(1, sizeof *queue);
    LOCK();
    *queue = (Queue){.magic = QUEUE_MAGIC, .gpu = current_gpu, .flags = flags, .priority = priority, .id = next_id++};
    queue->next = queues;
    queues = queue;
    UNLOCK();
    *out = (cudaStream_t)queue;
    return cudaSuccess;
}

Status cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
Status cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }

/* The memory of the struct remains, so that a handle used after its end can be recognized. */
Status cudaStreamDestroy(cudaStream_t stream) {
    LOCK();
    Queue *queue = (Queue *)stream;
    if (queue->magic != QUEUE_MAGIC) {
        UNLOCK();
        return fail(cudaErrorInvalidResourceHandle);
    }
    Status error = run_until(queue, NULL);
    for (Queue **link = &queues; *link; link = &(*link)->next)
        if (*link == queue) {
            *link = queue->next;
            break;
        }
    queue->magic = 0;
    UNLOCK();
    return fail(error);
}

Status cudaStreamSynchronize(cudaStream_t stream) { return finish_queue(stream); }

/* The first query finds no work done, so that programs cannot rely on the query itself; a program that polls
 * finishes with the second query. */
Status cudaStreamQuery(cudaStream_t stream) {
    LOCK();
    Queue *queue = queue_of(stream);
    Status error = ruin();
    if (!error && queue->head) error = queue->polls++ ? run_until(queue, NULL) : cudaErrorNotReady;
    UNLOCK();
    return error;
}

Status cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = queue_of(stream)->flags;
    return cudaSuccess;
}

Status cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = queue_of(stream)->priority;
    return cudaSuccess;
}

Status cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = queue_of(stream)->id;
    return cudaSuccess;
}

Status cudaStreamGetDevice(cudaStream_t stream, int *gpu) {
    *gpu = queue_of(stream)->gpu;
    return cudaSuccess;
}

/* Graph capture is not supported. */
Status cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

Status cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return cudaSuccess;
}

Status cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

Status cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

Status cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *argument) {
    return submit(stream, (Work){.kind = CALL, .call = call, .argument = argument});
}

Status cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *argument, unsigned flags) {
    return submit(stream, (Work){.kind = STATUS_CALL, .status_call = call, .argument = argument});
}

/* ---- events ------------------------------------------------------------------------------------------ */

Status cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    Status error = open_gpu(current_gpu);
    if (error) return error;
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.magic = EVENT_MAGIC, .gpu = current_gpu, .flags = flags};
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

Status cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

Status cudaEventDestroy(cudaEvent_t handle) {
    LOCK();
    Event *event = (Event *)handle;
    release(event->last); /* queued waits have separate references */
    event->magic = 0;
    free(event);
    UNLOCK();
    return cudaSuccess;
}

Status cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    LOCK();
    Event *event = (Event *)handle;
    Queue *queue = queue_of(stream);
    int wrong = event->magic != EVENT_MAGIC || queue->magic != QUEUE_MAGIC || event->gpu != queue->gpu;
    Status error = wrong ? cudaErrorInvalidResourceHandle : open_gpu(queue->gpu);
    if (!error) {
        take_turns(queue);
        release(event->last);
        event->last = record_on(queue);
        if (!settings.lazy) error = run_until(queue, NULL);
    }
    UNLOCK();
    return fail(error);
}

Status cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

Status cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    LOCK();
    Record *record = ((Event *)handle)->last;
    Status error = cudaSuccess;
    if (record && !record->is_done) {
        record->references++;
        error = submit(stream, (Work){.kind = WAIT, .record = record});
    }
    UNLOCK();
    return error;
}

/* As in cudaStreamQuery, the first query runs no work. */
Status cudaEventQuery(cudaEvent_t handle) {
    LOCK();
    Record *record = ((Event *)handle)->last;
    Status error = ruin();
    if (!error && record && !record->is_done)
        error = record->polls++ ? run_until(record->queue, record) : cudaErrorNotReady;
    UNLOCK();
    return error;
}

Status cudaEventSynchronize(cudaEvent_t handle) {
    LOCK();
    Record *record = ((Event *)handle)->last;
    Status error = ruin();
    if (!error && record && !record->is_done) error = run_until(record->queue, record);
    if (record) trim_pools(record->queue->gpu);
    UNLOCK();
    return fail(error);
}

Status cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    LOCK();
    Record *a = ((Event *)first)->last, *b = ((Event *)second)->last;
    Status error = !a || !b ? cudaErrorInvalidResourceHandle : a->is_done && b->is_done ? cudaSuccess : cudaErrorNotReady;
    if (!error)
        *milliseconds = (float)(b->time.tv_sec - a->time.tv_sec) * 1e3f + (float)(b->time.tv_nsec - a->time.tv_nsec) / 1e6f;
    UNLOCK();
    return fail(error);
}
