/* A disk that fails and a process that dies, at a chosen call. The library is preloaded (LD_PRELOAD), and a program arms it:
 *
 *     fault_arm(folder, nth, action, error);   count from now on the calls that change files in the folder
 *     fault_count();                           the calls so far
 *
 * The n-th call, and for FAIL and SHORT all later ones too, does this by the action:
 *     FAIL   fails with `error`, and so do all later calls: a full or a broken disk
 *     ONCE   fails with `error` once
 *     SHORT  a write takes half of its bytes; all later calls fail
 *     KILL   a write takes half of its bytes; then the process is killed
 *
 * fault_refuse_memory(bytes, nth) refuses the n-th allocation of `bytes` or more, and all later ones until the program
 * calls it again; nth = 0 refuses none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL, ONCE, SHORT, KILL };
enum { PASS, REFUSE, HALVE };

static char folder[PATH_MAX];
static size_t folder_length;
static long nth, count;
static int action, error_number, armed;

void fault_arm(const char *path, long n, int what, int error) {
    folder_length = strlen(path);
    memcpy(folder, path, folder_length + 1);
    nth = n, action = what, error_number = error, count = 0, armed = 1;
}

long fault_count(void) { return count; }

static int is_inside(const char *path) {
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int names_file(int directory, const char *path) {
    char place[PATH_MAX], link[64];
    if (!armed) return 0;
    if (path[0] == '/') return is_inside(path);
    if (directory == AT_FDCWD) {
        if (!getcwd(place, sizeof place)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, place, sizeof place - 1);
        if (length < 0) return 0;
        place[length] = 0;
    }
    return is_inside(place);
}

static int is_file(int fd) {
    char place[PATH_MAX], link[64];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int before = errno;
    ssize_t length = readlink(link, place, sizeof place - 1);
    errno = before;
    if (length < 0) return 0;
    place[length] = 0;
    return is_inside(place);
}

/* Count a call, and return what becomes of it. */
static int fate(int writes) {
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (!nth || number < nth) return PASS;
    if (number == nth && writes && (action == SHORT || action == KILL)) return HALVE;
    if (action == KILL) kill(getpid(), SIGKILL);
    if (number > nth && action == ONCE) return PASS;
    errno = error_number;
    return REFUSE;
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define HALF(call) \
    do { \
        ssize_t done = (call); \
        if (action == KILL) kill(getpid(), SIGKILL); \
        return done; \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    int is = is_file(fd) ? fate(size > 1) : PASS;
    if (is == REFUSE) return -1;
    if (is == HALVE) HALF(next(fd, data, size / 2));
    return next(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place) {
    NEXT(pwrite64);
    int is = is_file(fd) ? fate(size > 1) : PASS;
    if (is == REFUSE) return -1;
    if (is == HALVE) HALF(next(fd, data, size / 2, place));
    return next(fd, data, size, place);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t place) { return pwrite64(fd, data, size, place); }

ssize_t writev(int fd, const struct iovec *parts, int number) {
    NEXT(writev);
    int is = is_file(fd) ? fate(number > 0 && parts[0].iov_len > 1) : PASS;
    if (is == REFUSE) return -1;
    if (is == HALVE) {
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        HALF(next(fd, &half, 1));
    }
    return next(fd, parts, number);
}

int fsync(int fd) {
    NEXT(fsync);
    return is_file(fd) && fate(0) == REFUSE ? -1 : next(fd);
}

int fdatasync(int fd) {
    NEXT(fdatasync);
    return is_file(fd) && fate(0) == REFUSE ? -1 : next(fd);
}

int ftruncate64(int fd, off64_t size) {
    NEXT(ftruncate64);
    return is_file(fd) && fate(0) == REFUSE ? -1 : next(fd, size);
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int rename(const char *from, const char *to) {
    NEXT(rename);
    return names_file(AT_FDCWD, to) && fate(0) == REFUSE ? -1 : next(from, to);
}

int renameat(int from_directory, const char *from, int directory, const char *to) {
    NEXT(renameat);
    return names_file(directory, to) && fate(0) == REFUSE ? -1 : next(from_directory, from, directory, to);
}

int mkdir(const char *path, mode_t mode) {
    NEXT(mkdir);
    return names_file(AT_FDCWD, path) && fate(0) == REFUSE ? -1 : next(path, mode);
}

static int is_for_writing(int flags) { return (flags & O_ACCMODE) != O_RDONLY; }

static int takes_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

int openat64(int directory, const char *path, int flags, ...) {
    NEXT(openat64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = takes_mode(flags) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (is_for_writing(flags) && names_file(directory, path) && fate(0) == REFUSE) return -1;
    return next(directory, path, flags, mode);
}

#define OPEN(name, directory, arguments) \
    int name arguments { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = takes_mode(flags) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return openat64(directory, path, flags, mode); \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...))
OPEN(openat, directory, (int directory, const char *path, int flags, ...))

/* glibc's fopen opens inside the library, where no other open() takes its place. */
FILE *fopen64(const char *path, const char *mode) {
    NEXT(fopen64);
    return mode[0] != 'r' && names_file(AT_FDCWD, path) && fate(0) == REFUSE ? NULL : next(path, mode);
}

FILE *fopen(const char *path, const char *mode) { return fopen64(path, mode); }

/* Memory. numpy's large arrays come from calloc and malloc, onnxruntime's arena from posix_memalign. */

static size_t refused_bytes;
static long refused_nth, allocations;

void fault_refuse_memory(size_t bytes, long n) {
    refused_bytes = bytes, allocations = 0;
    __atomic_store_n(&refused_nth, n, __ATOMIC_SEQ_CST);
}

long fault_allocations(void) { return allocations; }

static int is_refused(size_t bytes) {
    if (!refused_bytes || bytes < refused_bytes) return 0;
    long number = __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
    return refused_nth && number >= refused_nth;
}

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) {
    if (!is_refused(size)) return __libc_malloc(size);
    errno = ENOMEM;
    return NULL;
}

void *calloc(size_t number, size_t size) {
    if (!is_refused(number * size)) return __libc_calloc(number, size);
    errno = ENOMEM;
    return NULL;
}

void *realloc(void *block, size_t size) {
    if (!is_refused(size)) return __libc_realloc(block, size);
    errno = ENOMEM;
    return NULL;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *memory = is_refused(size) ? NULL : __libc_memalign(alignment, size);
    if (!memory) return ENOMEM;
    *block = memory;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
    if (!is_refused(size)) return __libc_memalign(alignment, size);
    errno = ENOMEM;
    return NULL;
}
