/* Kernels. CuPy's are C++: a replacement of NVRTC compiles them for the host (see compile_kernel.py), and the
 * "cubin" is the path of that library. PyTorch's kernels are machine code and cannot run: fill and sleep are
 * recognized by their names, all others fail as a GPU would reject a kernel of another architecture. */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* ---- NVRTC --------------------------------------------------------------------------------------------- */

typedef struct Program {
    char *source, *log, path[300];
} Program;

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcGetNumSupportedArchs(int *count) {
    *count = 2;
    return 0;
}

int nvrtcGetSupportedArchs(int *found) {
    found[0] = 80;
    found[1] = 90;
    return 0;
}

const char *nvrtcGetErrorString(int code) { return code ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }

int nvrtcCreateProgram(Program **out, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names) {
    *out = calloc(1, sizeof **out);
    (*out)->source = strdup(source);
    return 0;
}

int nvrtcDestroyProgram(Program **program) {
    free((*program)->source);
    free((*program)->log);
    free(*program);
    *program = NULL;
    return 0;
}

int nvrtcAddNameExpression(Program *program, const char *name) { return 0; }

int nvrtcGetLoweredName(Program *program, const char *name, const char **out) {
    *out = name;
    return 0;
}

static char *whole_file(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) return NULL;
    char *text = calloc(1, 20001);
    if (fread(text, 1, 20000, file) == 0) text[0] = 0;
    fclose(file);
    return text;
}

/* GPU_PYTHON compiles, with GPU_COMPILER, into GPU_KERNELS, where compiled kernels are cached. */
int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    const char *folder = getenv("GPU_KERNELS"), *python = getenv("GPU_PYTHON"), *script = getenv("GPU_COMPILER");
    if (!folder || !python || !script) return 6;
    uint64_t hash = 1469598103934665603ull; /* FNV-1a */
    for (const char *c = program->source; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
    for (int i = 0; i < count; i++)
        for (const char *c = options[i]; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
    snprintf(program->path, sizeof program->path, "%s/%016llx.so", folder, (unsigned long long)hash);
    if (!access(program->path, R_OK)) return 0;
    char source[340], log[340], unique[32];
    snprintf(unique, sizeof unique, ".%d.%d", getpid(), gettid());
    snprintf(source, sizeof source, "%s%s.cu", program->path, unique);
    snprintf(log, sizeof log, "%s%s.log", program->path, unique);
    FILE *file = fopen(source, "w");
    if (!file) return 6;
    fputs(program->source, file);
    fclose(file);
    /* The compiler runs without the GPU. */
    const char *arguments[256] = {"/usr/bin/env", "-u", "LD_PRELOAD", "-u", "LD_LIBRARY_PATH", "-u", "PYTHONPATH",
                                  python, script, source, program->path, log};
    int used = 12, status = 1;
    for (int i = 0; i < count && used < 255; i++) arguments[used++] = options[i];
    arguments[used] = NULL;
    pid_t child = vfork();
    if (!child) {
        execve(arguments[0], (char *const *)arguments, environ);
        _exit(127);
    }
    waitpid(child, &status, 0);
    program->log = whole_file(log);
    unlink(source);
    unlink(log);
    return status ? 6 : 0;
}

int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = (program->log ? strlen(program->log) : 0) + 1;
    return 0;
}

int nvrtcGetProgramLog(Program *program, char *out) {
    strcpy(out, program->log ? program->log : "");
    return 0;
}

int nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = strlen(program->path) + 1;
    return 0;
}

int nvrtcGetCUBIN(Program *program, char *out) {
    strcpy(out, program->path);
    return 0;
}

int nvrtcGetPTXSize(Program *program, size_t *size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program *program, char *out) { return nvrtcGetCUBIN(program, out); }

/* ---- modules and functions ------------------------------------------------------------------------------ */

typedef struct Function {
    void *(*bind)(void **arguments);
    void (*run)(void *bound, const unsigned *sizes, size_t shared, int with_barriers);
    void (*drop)(void *bound);
    int with_barriers;
    char name[];
} Function;

struct Launch {
    Function *function;
    unsigned sizes[6]; /* grid, block */
    size_t shared;
    void *bound;
};

enum { DRIVER_SUCCESS = 0, DRIVER_INVALID_IMAGE = 200, DRIVER_NOT_FOUND = 500 };

int cuModuleLoadData(void **module, const void *image) {
    *module = dlopen(image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) trace_line("%s", dlerror());
    return *module ? DRIVER_SUCCESS : DRIVER_INVALID_IMAGE;
}

int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
    return cuModuleLoadData(module, image);
}

int cuModuleUnload(void *module) { return DRIVER_SUCCESS; }

int cuModuleGetFunction(void **out, void *module, const char *name) {
    char bind[600];
    snprintf(bind, sizeof bind, "gpu_bind_%s", name);
    Function *function = calloc(1, sizeof *function + strlen(name) + 1);
    strcpy(function->name, name);
    function->bind = dlsym(module, bind);
    function->run = dlsym(module, "gpu_run");
    function->drop = dlsym(module, "gpu_drop");
    int *with_barriers = dlsym(module, "gpu_with_barriers");
    function->with_barriers = with_barriers && *with_barriers;
    *out = function;
    return function->bind ? DRIVER_SUCCESS : DRIVER_NOT_FOUND;
}

int cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return cuModuleLoadData(library, image);
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return cuModuleGetFunction(kernel, library, name); }

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads per block, registers */
    return DRIVER_SUCCESS;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return DRIVER_SUCCESS; }

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int block, size_t shared) {
    *count = 2;
    return DRIVER_SUCCESS;
}

int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *function, void *size_of, size_t shared, int limit) {
    *grid = 8;
    *block = 128;
    return DRIVER_SUCCESS;
}

/* ---- running ---------------------------------------------------------------------------------------------- */

static sigjmp_buf out_of_kernel;
static pthread_t runs_kernel;
static volatile sig_atomic_t is_running;
static struct sigaction before, before_illegal;
static uint64_t launched;

uint64_t launched_kernels(void) { return launched; }

/* A kernel that accesses invalid memory causes an error, as on a GPU, and does not crash the process. */
static void on_fault(int signal_number, siginfo_t *info, void *context) {
    if (is_running && pthread_equal(runs_kernel, pthread_self())) siglongjmp(out_of_kernel, signal_number);
    /* a third-party fault: it is raised again with the previous handler */
    sigaction(signal_number, signal_number == SIGILL ? &before_illegal : &before, NULL);
}

void drop_launch(Launch *launch) {
    launch->function->drop(launch->bound);
    free(launch);
}

/* compile_kernel.py compiles a check of each address, which ends in an illegal instruction if it is misaligned. */
Status run_kernel(Launch *launch, int gpu) {
    Function *function = launch->function;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    trace_line("run %s, grid %u, block %u", function->name, launch->sizes[0], launch->sizes[3]);
    make_memory_reachable(1, gpu);
    runs_kernel = pthread_self();
    sigaction(SIGSEGV, &action, &before);
    sigaction(SIGILL, &action, &before_illegal);
    int fault = sigsetjmp(out_of_kernel, 1);
    if (!fault) {
        is_running = 1;
        function->run(launch->bound, launch->sizes, launch->shared, function->with_barriers);
    } else {
        set_ruin(fault == SIGILL ? cudaErrorMisalignedAddress : cudaErrorIllegalAddress);
    }
    is_running = 0;
    sigaction(SIGSEGV, &before, NULL);
    sigaction(SIGILL, &before_illegal, NULL);
    make_memory_reachable(0, gpu);
    launched++;
    return ruin();
}

int cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, cudaStream_t stream, void **arguments, void **extra) {
    Launch *launch = calloc(1, sizeof *launch);
    *launch = (Launch){.function = function, .sizes = {gx, gy, gz, bx, by, bz}, .shared = shared, .bound = function->bind(arguments)};
    return submit(stream, (Work){.kind = KERNEL, .launch = launch});
}

/* ---- kernels that are compiled into their library (torch) -------------------------------------------------- */

static struct Known {
    const void *address;
    const char *name;
} *known;
static size_t known_count, known_room;

void __cudaRegisterFunction(void **handle, const char *address, char *device_function, const char *name, int limit,
                            void *a, void *b, void *c, void *d, int *e) {
    if (known_count == known_room) {
        known_room = known_room ? 2 * known_room : 4096;
        known = realloc(known, known_room * sizeof *known);
    }
    known[known_count++] = (struct Known){address, name};
}

void **__cudaRegisterFatBinary(void *image) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *address, char *variable, const char *name, int external, size_t size,
                       int constant, int global) {}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configurations[8];
static __thread int configured;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configurations[configured].grid = grid;
    configurations[configured].block = block;
    configurations[configured].shared = shared;
    configurations[configured++].stream = stream;
    return 0;
}

Status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    configured--;
    *grid = configurations[configured].grid;
    *block = configurations[configured].block;
    *shared = configurations[configured].shared;
    *(cudaStream_t *)stream = configurations[configured].stream;
    return cudaSuccess;
}

Status __cudaGetKernel(cudaKernel_t *kernel, const void *address) {
    *kernel = (cudaKernel_t)address;
    return cudaSuccess;
}

static const char *name_of(const void *address) {
    for (size_t i = 0; i < known_count; i++)
        if (known[i].address == address) return known[i].name;
    return "a kernel without a name";
}

static void do_nothing(void *argument) {}

typedef struct Fill {
    char *to, value[16];
    size_t width, count;
} Fill;

static void fill(void *argument) {
    Fill *job = argument;
    char *to = host_side(job->to);
    if ((uintptr_t)job->to % job->width) set_ruin(cudaErrorMisalignedAddress);
    for (size_t i = 0; i < job->count; i++) memcpy(to + i * job->width, job->value, job->width);
}

/* The size of the type at the start of a mangled template argument, or 0 if it is unknown. */
static size_t width_of(const char *type) {
    static const struct {
        const char *prefix;
        size_t width;
    } types[] = {{"N3c104HalfE", 2}, {"N3c108BFloat16E", 2}, {"N3c107complexIfE", 8}, {"N3c107complexIdE", 16}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strncmp(type, types[i].prefix, strlen(types[i].prefix))) return types[i].width;
    return strchr("bah", *type) ? 1 : strchr("st", *type) ? 2 : strchr("ijf", *type) ? 4 : strchr("lmdxy", *type) ? 8 : 0;
}

Status cudaLaunchKernel(const void *address, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    const char *name = name_of(address), *functor = strstr(name, "FillFunctorI");
    if (strstr(name, "spin_kernel")) return submit(stream, (Work){.kind = CALL, .call = do_nothing});
    size_t width = functor ? width_of(functor + strlen("FillFunctorI")) : 0;
    if (width && strstr(name, "vectorized_elementwise_kernel")) {
        /* int count, the functor (which holds the value), std::array<char *, 1> */
        Fill *job = calloc(1, sizeof *job);
        *job = (Fill){.to = *(char **)arguments[2], .width = width, .count = (size_t)*(int *)arguments[0]};
        memcpy(job->value, arguments[1], width);
        return submit(stream, (Work){.kind = CALL, .call = fill, .argument = job, .owns_argument = 1});
    }
    trace_line("machine code, which is not emulated: %s", name);
    return fail(cudaErrorNoKernelImageForDevice);
}

Status cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *address, void **arguments) {
    return cudaLaunchKernel(address, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, c->stream);
}

Status __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

Status cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *address) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = 80;
    return cudaSuccess;
}

Status cudaFuncSetAttribute(const void *address, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

Status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int block, size_t shared, unsigned flags) {
    *count = 2;
    return cudaSuccess;
}

Status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int block, size_t shared) {
    *count = 2;
    return cudaSuccess;
}
