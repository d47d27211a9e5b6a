/* Allocations and their accounting, pools of asynchronous allocations, and copies. */
#define _GNU_SOURCE
#include "gpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- blocks, sorted by address ----------------------------------------------------------------------- */

static Block *blocks;
static size_t block_count, block_room;
static size_t used[MAX_GPUS];
static size_t reserved_bytes(int gpu);

static size_t rank(const void *address) {
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].address <= (char *)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

Block *find_block(const void *address) {
    size_t i = rank(address);
    if (!i) return NULL;
    Block *block = &blocks[i - 1];
    return (char *)address < block->address + block->size ? block : NULL;
}

static void insert(Block block) {
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    size_t i = rank(block.address);
    memmove(blocks + i + 1, blocks + i, (block_count - i) * sizeof *blocks);
    blocks[i] = block;
    block_count++;
}

static void erase(Block *block) {
    size_t i = (size_t)(block - blocks);
    memmove(blocks + i, blocks + i + 1, (block_count - i - 1) * sizeof *blocks);
    block_count--;
}

char *host_side(const void *address) {
    Block *block = find_block(address);
    return block ? block->host + ((char *)address - block->address) : (char *)address;
}

void make_memory_reachable(int reachable, int gpu) {
    for (size_t i = 0; i < block_count; i++) {
        Block *block = &blocks[i];
        if (block->kind != cudaMemoryTypeDevice) continue;
        int is_far = !is_peer(gpu, block->gpu), is_guarded = block->host != block->address;
        if (is_guarded ? !is_far : is_far)
            mprotect(block->address, block->mapped, reachable == is_guarded ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
}

size_t used_bytes(int gpu) { return used[gpu]; }

/* The driver takes memory from the GPU in blocks of 2 MiB. Small allocations share them. */
#define CHUNK ((size_t)2 << 20)

static size_t occupied_with(int gpu, size_t more) {
    size_t small = more < CHUNK ? more : 0, large = more < CHUNK ? 0 : (more + CHUNK - 1) / CHUNK * CHUNK;
    for (size_t i = 0; i < block_count; i++) {
        Block *block = &blocks[i];
        if (block->gpu != gpu || block->kind != cudaMemoryTypeDevice || block->pool) continue;
        if (block->size < CHUNK) small += (block->size + 511) / 512 * 512;
        else large += (block->size + CHUNK - 1) / CHUNK * CHUNK;
    }
    size_t pools = reserved_bytes(gpu);
    return (small + CHUNK - 1) / CHUNK * CHUNK + large + pools + (is_open(gpu) ? settings.context : 0);
}

size_t occupied_bytes(int gpu) { return occupied_with(gpu, 0); }

size_t count_blocks(enum cudaMemoryType kind) {
    size_t count = 0;
    for (size_t i = 0; i < block_count; i++) count += blocks[i].kind == kind;
    return count;
}

/* ---- allocating ---------------------------------------------------------------------------------------- */

#define GRAIN 512 /* bytes that a real GPU rounds up to */
#define PAGE ((size_t)4096)
#define POISONED ((size_t)1 << 20)

static size_t rounded(size_t size, size_t grain) { return (size + grain - 1) / grain * grain; }

/* Fill memory, so that new memory is not zero by chance, and freed memory not correct by chance. */
static void poison(Block *block, int with) { memset(block->host, with, block->size < POISONED ? block->size : POISONED); }

/* Each block has separate pages followed by an unreachable one, so that a kernel that reads or writes
 * beyond its end, or after it was freed, is detected. */
static Status map_block(Block *block) {
    block->mapped = rounded(block->size, PAGE);
    int guarded = settings.guarded && block->kind == cudaMemoryTypeDevice;
    int file = guarded ? memfd_create("gpu", MFD_CLOEXEC) : -1;
    if (guarded && ftruncate(file, (off_t)block->mapped)) abort();
    char *place = mmap(NULL, block->mapped + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return cudaErrorMemoryAllocation;
    block->address = block->host = place;
    if (guarded) {
        mmap(place, block->mapped, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
        block->host = mmap(NULL, block->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    } else {
        mprotect(place, block->mapped, PROT_READ | PROT_WRITE);
    }
    return cudaSuccess;
}

static Status allocate(void **out, size_t size, int gpu, enum cudaMemoryType kind, unsigned flags, Pool *pool) {
    if (!out) return fail(cudaErrorInvalidValue);
    *out = NULL;
    Status error = check_captures();
    if (!error) error = gpu == current_gpu() ? open_current() : open_gpu(gpu);
    if (error || !size) return error;
    LOCK();
    size_t taken = rounded(size, GRAIN);
    Block block = {.size = size, .gpu = gpu, .kind = kind, .flags = flags, .pool = pool};
    if (kind == cudaMemoryTypeDevice && !pool) {
        if (occupied_with(gpu, taken) > settings.capacity) error = cudaErrorMemoryAllocation;
    }
    if (!error) error = map_block(&block);
    if (error) {
        trace_line("out of memory on gpu %d: %zu bytes", gpu, size);
        UNLOCK();
        return fail(error);
    }
    poison(&block, 0xA5);
    if (kind == cudaMemoryTypeDevice && !pool) used[gpu] += taken;
    insert(block);
    *out = block.address;
    UNLOCK();
    return cudaSuccess;
}

Status free_block(void *address, enum cudaMemoryType kind) {
    if (!address) return cudaSuccess;
    LOCK();
    Block *found = find_block(address);
    if (!found || found->address != address || found->kind != kind || found->registered) {
        UNLOCK();
        return fail(cudaErrorInvalidValue);
    }
    Block block = *found;
    erase(found);
    if (block.pool) block.pool->used -= rounded(block.size, GRAIN);
    else if (kind == cudaMemoryTypeDevice) used[block.gpu] -= rounded(block.size, GRAIN);
    poison(&block, 0xDD);
    if (block.host != block.address) munmap(block.host, block.mapped);
    munmap(block.address, block.mapped + PAGE);
    UNLOCK();
    return cudaSuccess;
}

Status cudaMalloc(void **out, size_t size) {
    return allocate(out, size, current_gpu(), cudaMemoryTypeDevice, 0, NULL);
}

Status cudaMallocManaged(void **out, size_t size, unsigned flags) {
    return allocate(out, size, current_gpu(), cudaMemoryTypeManaged, flags, NULL);
}

Status cudaHostAlloc(void **out, size_t size, unsigned flags) {
    return allocate(out, size, current_gpu(), cudaMemoryTypeHost, flags, NULL);
}

Status cudaMallocHost(void **out, size_t size) { return cudaHostAlloc(out, size, 0); }

/* A free waits for the whole GPU, and programs may rely only on this. */
Status cudaFree(void *address) {
    if (!address) return open_current();
    Status prohibited = check_captures();
    if (prohibited) return prohibited;
    LOCK();
    Block *block = find_block(address);
    Status error = block ? finish_gpu(block->gpu) : fail(cudaErrorInvalidValue);
    block = find_block(address);
    if (!error && block) error = free_block(address, block->kind == cudaMemoryTypeManaged ? block->kind : cudaMemoryTypeDevice);
    UNLOCK();
    return error;
}

Status cudaFreeHost(void *address) {
    LOCK();
    Status error = cudaSuccess;
    for (int gpu = 0; gpu < settings.gpus && !error; gpu++)
        if (is_open(gpu)) error = finish_gpu(gpu);
    if (!error) error = free_block(address, cudaMemoryTypeHost);
    UNLOCK();
    return error;
}

Status cudaHostRegister(void *address, size_t size, unsigned flags) {
    Status error = open_current();
    if (error) return error;
    LOCK();
    if (find_block(address) || find_block((char *)address + size - 1)) error = fail(cudaErrorHostMemoryAlreadyRegistered);
    else insert((Block){.address = address, .host = address, .size = size, .gpu = current_gpu(),
                        .kind = cudaMemoryTypeHost, .flags = flags, .registered = 1});
    UNLOCK();
    return error;
}

Status cudaHostUnregister(void *address) {
    LOCK();
    Block *block = find_block(address);
    int known = block && block->address == address && block->registered;
    if (known) erase(block);
    UNLOCK();
    return known ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

Status cudaHostGetDevicePointer(void **out, void *address, unsigned flags) {
    *out = address;
    return cudaSuccess;
}

Status cudaHostGetFlags(unsigned *flags, void *address) {
    LOCK();
    Block *block = find_block(address);
    if (block) *flags = block->flags;
    UNLOCK();
    return block ? cudaSuccess : fail(cudaErrorInvalidValue);
}

Status cudaMemGetInfo(size_t *available, size_t *total) {
    Status error = open_current();
    *total = settings.capacity;
    *available = settings.capacity - occupied_bytes(current_gpu());
    return error;
}

/* Opens the current GPU: a query of an address is not free. */
Status cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    Status error = open_current();
    if (error) return error;
    memset(out, 0, sizeof *out);
    LOCK();
    Block *block = find_block(address);
    if (block) {
        out->type = block->kind;
        out->device = block->gpu;
        out->devicePointer = (void *)address;
        out->hostPointer = block->kind == cudaMemoryTypeDevice ? NULL : (void *)address;
    } else { /* memory that CUDA neither allocated nor knows */
        out->type = cudaMemoryTypeUnregistered;
        out->device = cudaInvalidDeviceId;
        out->hostPointer = (void *)address;
    }
    UNLOCK();
    return cudaSuccess;
}

Status cudaMemAdvise(const void *p, size_t n, enum cudaMemoryAdvise advice, struct cudaMemLocation where) {
    return cudaSuccess;
}

Status cudaMemPrefetchAsync(const void *p, size_t n, struct cudaMemLocation where, unsigned flags, cudaStream_t s) {
    return cudaSuccess;
}

/* ---- pools: memory that is allocated and freed in the order of a stream ------------------------------- */

static Pool default_pools[MAX_GPUS];
static size_t pooled[MAX_GPUS];
static Pool *current_pools[MAX_GPUS];

static Pool *default_pool(int gpu) {
    default_pools[gpu].gpu = gpu;
    return &default_pools[gpu];
}

static Pool *current_pool(int gpu) { return current_pools[gpu] ? current_pools[gpu] : default_pool(gpu); }

/* Bytes that the pools of a GPU hold. */
static size_t reserved_bytes(int gpu) { return pooled[gpu]; }

static void trim(Pool *pool, size_t keep) {
    size_t wanted = pool->used > keep ? pool->used : keep;
    if (pool->reserved <= wanted) return;
    used[pool->gpu] -= pool->reserved - wanted;
    pooled[pool->gpu] -= pool->reserved - wanted;
    pool->reserved = wanted;
}

void trim_pools(int gpu) {
    Pool *pool = current_pool(gpu);
    trim(pool, pool->threshold > SIZE_MAX ? SIZE_MAX : (size_t)pool->threshold);
}

Status cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t handle, cudaStream_t stream) {
    Pool *pool = (Pool *)handle;
    size_t taken = rounded(size, GRAIN);
    LOCK();
    if (pool->used + taken > pool->reserved) {
        size_t more = pool->used + taken - pool->reserved;
        if (occupied_bytes(pool->gpu) + more > settings.capacity) { /* freed memory becomes available when its stream runs */
            finish_gpu(pool->gpu);
            more = pool->used + taken > pool->reserved ? pool->used + taken - pool->reserved : 0;
        }
        if (occupied_bytes(pool->gpu) + more > settings.capacity) {
            UNLOCK();
            return fail(cudaErrorMemoryAllocation);
        }
        pool->reserved += more;
        used[pool->gpu] += more;
        pooled[pool->gpu] += more;
        if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    }
    Status error = allocate(out, size, pool->gpu, cudaMemoryTypeDevice, 0, pool);
    if (!error) pool->used += taken;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    UNLOCK();
    return error;
}

Status cudaMallocAsync(void **out, size_t size, cudaStream_t stream) {
    return cudaMallocFromPoolAsync(out, size, (cudaMemPool_t)current_pool(gpu_of_queue(queue_of(stream))), stream);
}

Status cudaFreeAsync(void *address, cudaStream_t stream) {
    return submit(stream, (Work){.kind = FREE, .to = address});
}

Status cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int gpu) {
    *pool = (cudaMemPool_t)default_pool(gpu);
    return cudaSuccess;
}

Status cudaDeviceGetMemPool(cudaMemPool_t *pool, int gpu) {
    *pool = (cudaMemPool_t)current_pool(gpu);
    return cudaSuccess;
}

Status cudaDeviceSetMemPool(int gpu, cudaMemPool_t pool) {
    current_pools[gpu] = (Pool *)pool;
    return cudaSuccess;
}

Status cudaMemPoolCreate(cudaMemPool_t *out, const struct cudaMemPoolProps *props) {
    Pool *pool = calloc(1, sizeof *pool);
    pool->gpu = props->location.id;
    *out = (cudaMemPool_t)pool;
    return open_gpu(pool->gpu);
}

Status cudaMemPoolDestroy(cudaMemPool_t handle) {
    Pool *pool = (Pool *)handle; /* not freed: its blocks may still refer to it */
    LOCK();
    finish_gpu(pool->gpu);
    trim(pool, 0);
    pool->is_destroyed = 1;
    if (current_pools[pool->gpu] == pool) current_pools[pool->gpu] = NULL;
    UNLOCK();
    return cudaSuccess;
}

Status cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
    LOCK();
    trim((Pool *)pool, keep);
    UNLOCK();
    return cudaSuccess;
}

Status cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    Pool *pool = (Pool *)handle;
    if (attribute == cudaMemPoolAttrReleaseThreshold) pool->threshold = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->used_high = pool->used;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->reserved_high = pool->reserved;
    return cudaSuccess;
}

Status cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    Pool *pool = (Pool *)handle;
    switch ((int)attribute) {
    case cudaMemPoolAttrReleaseThreshold: *(uint64_t *)value = pool->threshold; break;
    case cudaMemPoolAttrReservedMemCurrent: *(uint64_t *)value = pool->reserved; break;
    case cudaMemPoolAttrReservedMemHigh: *(uint64_t *)value = pool->reserved_high; break;
    case cudaMemPoolAttrUsedMemCurrent: *(uint64_t *)value = pool->used; break;
    case cudaMemPoolAttrUsedMemHigh: *(uint64_t *)value = pool->used_high; break;
    default: *(int *)value = 1; /* attributes of block reuse */
    }
    return cudaSuccess;
}

Status cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return cudaSuccess;
}

/* ---- copies -------------------------------------------------------------------------------------------- */

/* Whether this many bytes from here on are within one block, or in memory that CUDA does not know. */
static int fits(const void *address, size_t size) {
    Block *block = find_block(address);
    return !block || (char *)address + size <= block->address + block->size;
}

static size_t extent(size_t width, size_t rows, size_t pitch) { return rows ? (rows - 1) * pitch + width : width; }

/* A copy out of pageable memory reads the bytes immediately; one into pageable memory is synchronous. All
 * others run when their stream reaches them, with the bytes at that time. */
static Status copy(Work work, cudaStream_t stream, int is_blocking) {
    if (!work.width) return cudaSuccess;
    LOCK();
    size_t read = extent(work.width, work.rows, work.from_pitch), written = extent(work.width, work.rows, work.to_pitch);
    if (!fits(work.from, read) || !fits(work.to, written)) {
        UNLOCK();
        return fail(cudaErrorInvalidValue);
    }
    work.kind = COPY;
    is_blocking |= !find_block(work.to);
    if (!is_blocking && !find_block(work.from)) {
        work.staged = malloc(read);
        memcpy(work.staged, work.from, read);
        work.from = work.staged;
    }
    Status error = submit(stream, work);
    if (!error && is_blocking) error = finish_queue(stream);
    UNLOCK();
    return error;
}

static int is_on_gpu(const void *address) {
    Block *block = find_block(address);
    return block && block->kind == cudaMemoryTypeDevice;
}

Status cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    LOCK();
    int wrong = size && ((kind == cudaMemcpyHostToDevice && is_on_gpu(from)) ||
                         (kind == cudaMemcpyDeviceToHost && is_on_gpu(to)));
    UNLOCK();
    if (wrong) return fail(cudaErrorInvalidValue);
    return copy((Work){.to = to, .from = from, .width = size}, stream, 0);
}

Status cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    LOCK();
    /* Within a GPU, the copy is queued and asynchronous, as the runtime's documentation states. */
    int blocking = !(is_on_gpu(to) && is_on_gpu(from));
    UNLOCK();
    return copy((Work){.to = to, .from = from, .width = size}, NULL, blocking);
}

Status cudaMemcpyPeerAsync(void *to, int to_gpu, const void *from, int from_gpu, size_t size, cudaStream_t stream) {
    return copy((Work){.to = to, .from = from, .width = size}, stream, 0);
}

Status cudaMemcpyPeer(void *to, int to_gpu, const void *from, int from_gpu, size_t size) {
    return copy((Work){.to = to, .from = from, .width = size}, NULL, 0);
}

Status cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                         enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (!rows) return cudaSuccess;
    Work work = {.to = to, .from = from, .width = width, .rows = rows, .to_pitch = to_pitch, .from_pitch = from_pitch};
    return copy(work, stream, 0);
}

Status cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                    enum cudaMemcpyKind kind) {
    if (!rows) return cudaSuccess;
    Work work = {.to = to, .from = from, .width = width, .rows = rows, .to_pitch = to_pitch, .from_pitch = from_pitch};
    return copy(work, NULL, 1);
}

Status cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    if (!size) return cudaSuccess;
    LOCK();
    int right = fits(to, size);
    UNLOCK();
    return right ? submit(stream, (Work){.kind = FILL, .to = to, .value = value, .width = size}) : fail(cudaErrorInvalidValue);
}

Status cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }
