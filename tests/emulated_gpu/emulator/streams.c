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

/* A graph that is captured, or that was. Its work is in the order in which it was submitted. */
typedef struct Capture {
    int mode, is_invalid;
    pthread_t thread;
    Queue *origin;
    Work *head, *tail;
    struct Capture *next;
} Capture;

struct Queue {
    int magic, gpu, priority, polls;
    Capture *capture; /* of which this stream is a part */
    int is_forked;    /* whether the origin of the capture has not waited for this stream's last work */
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
    Queue *captured_on; /* if it was recorded in a stream that is part of a capture */
} Event;

static Queue *queues, defaults[MAX_GPUS];
static __thread Queue *per_thread[MAX_GPUS];
static Capture *captures;
static __thread int capture_mode; /* cudaStreamCaptureModeGlobal */
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
    case CALL:
        work->call(work->argument);
        if (work->owns_argument && !work->is_replayed) free(work->argument);
        break;
    case STATUS_CALL: work->status_call((cudaStream_t)queue, cudaSuccess, work->argument); break;
    case FREE: return free_block(work->to, cudaMemoryTypeDevice);
    case KERNEL: {
        Status error = run_kernel(work->launch, queue->gpu);
        if (!work->is_replayed) drop_launch(work->launch);
        return error;
    }
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

static Queue *new_queue(int gpu, unsigned flags, int priority) {
    Queue *queue = calloc(1, sizeof *queue);
    LOCK();
    *queue = (Queue){.magic = QUEUE_MAGIC, .gpu = gpu, .flags = flags, .priority = priority, .id = next_id++};
    queue->next = queues;
    queues = queue;
    UNLOCK();
    return queue;
}

/* Handle 2 denotes a stream of each thread, which waits for the default stream like any blocking stream. */
Queue *queue_of(cudaStream_t stream) {
    if (stream == cudaStreamPerThread) {
        int gpu = current_gpu();
        if (!per_thread[gpu]) per_thread[gpu] = new_queue(gpu, 0, 0);
        return per_thread[gpu];
    }
    if (stream && stream != cudaStreamLegacy) return (Queue *)stream;
    Queue *queue = &defaults[current_gpu()];
    queue->magic = QUEUE_MAGIC;
    queue->gpu = current_gpu();
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

/* ---- captured graphs ----------------------------------------------------------------------------------- */

static Status invalidate(Capture *capture, Status error) {
    capture->is_invalid = 1;
    return fail(error);
}

int exchange_capture_mode(int mode) {
    int before = capture_mode;
    capture_mode = mode;
    return before;
}

/* Calls such as cudaMalloc and cudaEventQuery are prohibited in a thread that captures, and in all threads if the
 * capture is global, unless the mode of the calling thread permits them. */
Status check_captures(void) {
    Status error = cudaSuccess;
    LOCK();
    for (Capture *one = captures; one && capture_mode != cudaStreamCaptureModeRelaxed; one = one->next) {
        int is_own = pthread_equal(one->thread, pthread_self());
        int is_global = one->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
        if (is_own ? one->mode != cudaStreamCaptureModeRelaxed : is_global)
            error = invalidate(one, cudaErrorStreamCaptureUnsupported);
    }
    UNLOCK();
    return error;
}

/* The default stream would wait for a blocking stream that captures. */
static Status check_default(const Queue *queue) {
    if (queue != &defaults[queue->gpu]) return cudaSuccess;
    for (Queue *other = queues; other; other = other->next)
        if (other->gpu == queue->gpu && other->capture && is_blocking(other))
            return invalidate(other->capture, cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}

static Status capture_work(Queue *queue, Work work) {
    Capture *capture = queue->capture;
    if (capture->is_invalid) return fail(cudaErrorStreamCaptureInvalidated);
    if (work.staged || work.kind == FREE || work.kind == STATUS_CALL || (work.kind == CALL && !work.owns_argument))
        return invalidate(capture, cudaErrorStreamCaptureUnsupported); /* not emulated */
    Work *own = malloc(sizeof *own);
    *own = work;
    own->next = NULL;
    own->is_replayed = 1;
    if (capture->tail) capture->tail->next = own;
    else capture->head = own;
    capture->tail = own;
    queue->is_forked = queue != capture->origin;
    return cudaSuccess;
}

Status cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    Queue *queue = queue_of(stream);
    LOCK();
    Status error = cudaSuccess;
    if (queue == &defaults[queue->gpu]) error = fail(cudaErrorStreamCaptureUnsupported);
    else if (queue->capture) error = fail(cudaErrorIllegalState);
    if (!error) {
        Capture *capture = calloc(1, sizeof *capture);
        *capture = (Capture){.mode = mode, .thread = pthread_self(), .origin = queue, .next = captures};
        queue->capture = captures = capture;
    }
    UNLOCK();
    return error;
}

Status cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    LOCK();
    Queue *queue = queue_of(stream);
    Capture *capture = queue->capture;
    *graph = NULL;
    if (!capture || capture->origin != queue) {
        UNLOCK();
        return fail(cudaErrorIllegalState);
    }
    Status error = capture->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (Queue *other = queues; other; other = other->next) {
        if (other->capture != capture) continue;
        if (other->is_forked && !error) error = cudaErrorStreamCaptureUnjoined;
        other->capture = NULL;
        other->is_forked = 0;
    }
    for (Capture **link = &captures; *link; link = &(*link)->next)
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    if (!error) *graph = (cudaGraph_t)capture;
    UNLOCK();
    return fail(error);
}

Status cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    *out = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

Status cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(out, graph, flags);
}

Status cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 0;
    for (Work *work = ((Capture *)graph)->head; work; work = work->next) ++*count;
    return nodes ? fail(cudaErrorNotSupported) : cudaSuccess;
}

Status cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream) { return cudaSuccess; }
Status cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; } /* its work is not freed */
Status cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaSuccess; }

Status cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    Status error = cudaSuccess;
    LOCK();
    for (Work *work = ((Capture *)graph)->head; work && !error; work = work->next) error = submit(stream, *work);
    UNLOCK();
    return error;
}

Status submit(cudaStream_t stream, Work work) {
    LOCK();
    Queue *queue = queue_of(stream);
    Status error = queue->magic == QUEUE_MAGIC ? open_gpu(queue->gpu) : cudaErrorInvalidResourceHandle;
    if (!error) error = check_default(queue);
    if (!error && queue->capture) {
        error = capture_work(queue, work);
        UNLOCK();
        return error;
    }
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
    if (!error && queue->capture) error = invalidate(queue->capture, cudaErrorStreamCaptureUnsupported);
    if (!error) error = check_default(queue);
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
    Status error = open_current();
    if (!error) *out = (cudaStream_t)new_queue(current_gpu(), flags, priority);
    return error;
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
    if (!error && queue->capture) error = invalidate(queue->capture, cudaErrorStreamCaptureUnsupported);
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

static enum cudaStreamCaptureStatus capture_status(const Queue *queue) {
    if (!queue->capture) return cudaStreamCaptureStatusNone;
    return queue->capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

Status cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capture_status(queue_of(stream));
    return cudaSuccess;
}

Status cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                size_t *count) {
    *status = capture_status(queue_of(stream));
    if (id) *id = (unsigned long long)(uintptr_t)queue_of(stream)->capture;
    if (count) *count = 0;
    return cudaSuccess;
}

Status cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    *mode = exchange_capture_mode(*mode);
    return cudaSuccess;
}

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
    Status error = open_current();
    if (error) return error;
    Event *event = calloc(1, sizeof *event);
    *event = (Event){.magic = EVENT_MAGIC, .gpu = current_gpu(), .flags = flags};
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
    if (!error) error = check_default(queue);
    if (!error) event->captured_on = queue->capture ? queue : NULL;
    if (!error && queue->capture) {
        UNLOCK();
        return cudaSuccess;
    }
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

/* A stream that waits for an event of a capture becomes part of the capture. */
static Status join_capture(Queue *queue, Event *event) {
    Capture *capture = event->captured_on->capture;
    if (!capture) return fail(cudaErrorInvalidValue); /* the capture has ended */
    if (queue == &defaults[queue->gpu]) return invalidate(capture, cudaErrorStreamCaptureImplicit);
    if (!queue->capture) {
        queue->capture = capture;
        queue->is_forked = 1;
    } else {
        event->captured_on->is_forked = 0;
    }
    return cudaSuccess;
}

Status cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    LOCK();
    Queue *queue = queue_of(stream);
    Record *record = ((Event *)handle)->last;
    if (((Event *)handle)->captured_on || queue->capture) {
        Status wrong = ((Event *)handle)->captured_on ? join_capture(queue, (Event *)handle)
                       : record && !record->is_done ? invalidate(queue->capture, cudaErrorStreamCaptureIsolation)
                                                    : cudaSuccess;
        UNLOCK();
        return wrong;
    }
    Status error = cudaSuccess;
    if (record && !record->is_done) {
        record->references++;
        error = submit(stream, (Work){.kind = WAIT, .record = record});
    }
    UNLOCK();
    return error;
}

static Status check_event(Event *event) {
    Status error = check_captures();
    if (error || !event->captured_on) return error;
    Capture *capture = event->captured_on->capture;
    return capture ? invalidate(capture, cudaErrorCapturedEvent) : fail(cudaErrorCapturedEvent);
}

/* As in cudaStreamQuery, the first query runs no work. */
Status cudaEventQuery(cudaEvent_t handle) {
    LOCK();
    Record *record = ((Event *)handle)->last;
    Status error = ruin();
    if (!error) error = check_event((Event *)handle);
    if (!error && record && !record->is_done)
        error = record->polls++ ? run_until(record->queue, record) : cudaErrorNotReady;
    UNLOCK();
    return error;
}

Status cudaEventSynchronize(cudaEvent_t handle) {
    LOCK();
    Record *record = ((Event *)handle)->last;
    Status error = ruin();
    if (!error) error = check_event((Event *)handle);
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
