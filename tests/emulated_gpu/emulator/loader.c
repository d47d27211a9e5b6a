/* Libraries with CUDA's runtime linked in (CuPy's extension modules): when they are loaded, their own cuda*
 * functions are replaced by jumps to those of the emulation. This needs their symbol table, which CuPy's wheels
 * have and build.py finds. Only x86-64 is supported. */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { JUMP = 12 };

static void redirect(void *at, void *to) {
    unsigned char code[JUMP] = {0x48, 0xB8, [10] = 0xFF, [11] = 0xE0}; /* movabs rax, to; jmp rax */
    memcpy(code + 2, &to, sizeof to);
    void *page = (void *)((uintptr_t)at & ~(uintptr_t)4095);
    mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
    memcpy(at, code, JUMP);
    mprotect(page, 8192, PROT_READ | PROT_EXEC);
}

static int is_runtime_call(const char *name) { return !strncmp(name, "cuda", 4) || !strncmp(name, "__cuda", 6); }

static void redirect_calls(struct link_map *library) {
    static void *own;
    int file = open(library->l_name, O_RDONLY), count = 0;
    struct stat facts;
    if (file < 0) return;
    fstat(file, &facts);
    char *image = mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (image == MAP_FAILED) return;
    if (!own) {
        Dl_info self;
        dladdr((void *)redirect_calls, &self);
        own = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    Elf64_Ehdr *header = (Elf64_Ehdr *)image;
    Elf64_Shdr *sections = (Elf64_Shdr *)(image + header->e_shoff);
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        Elf64_Sym *symbols = (Elf64_Sym *)(image + sections[i].sh_offset);
        const char *names = image + sections[sections[i].sh_link].sh_offset;
        for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; j++) {
            const char *name = names + symbols[j].st_name;
            if (ELF64_ST_TYPE(symbols[j].st_info) != STT_FUNC || symbols[j].st_size < JUMP || !is_runtime_call(name)) continue;
            void *to = dlsym(own, name);
            if (!to) continue;
            redirect((char *)library->l_addr + symbols[j].st_value, to);
            count++;
        }
    }
    munmap(image, (size_t)facts.st_size);
    trace_line("%s: %d calls redirected", library->l_name, count);
}

static int is_cupys(const char *path) { return path && strstr(path, "/cup") && strstr(path, ".cpython"); }

void *dlopen(const char *path, int flags) {
    static void *(*real)(const char *, int);
    static struct link_map *seen[1024];
    static int seen_count;
    if (!real) real = dlsym(RTLD_NEXT, "dlopen");
    void *handle = real(path, flags);
    struct link_map *library;
    if (!handle || !is_cupys(path) || dlinfo(handle, RTLD_DI_LINKMAP, &library)) return handle;
    LOCK();
    int known = 0;
    for (int i = 0; i < seen_count && !known; i++) known = seen[i] == library;
    if (!known && seen_count < 1024) {
        seen[seen_count++] = library;
        redirect_calls(library);
    }
    UNLOCK();
    return handle;
}
