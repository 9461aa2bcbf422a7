/* Loaded before the C library (LD_PRELOAD): lets the n-th call to the file system below one folder fail, once.

   fail_at(folder, n, error) begins to count; n = 0 only counts. Each counted call is a line of the file $FAILING_LOG.
   fail_all(folder, call, error) lets all calls of one kind fail.
   Counted: open, read, write, fsync, rename, mkdir, unlink, rmdir, chmod, flock, truncate and the opening of folders,
   in all the forms in which Python, safetensors and matplotlib call them. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], lacking[16];
static int armed, count, target, failure;

void fail_at(const char *below, int n, int error) {
  snprintf(folder, sizeof folder, "%s/", below);
  count = 0, target = n, failure = error, armed = 1;
}

void fail_all(const char *below, const char *call, int error) {
  fail_at(below, 0, error);
  snprintf(lacking, sizeof lacking, "%s", call);
}

static int below(int fd, const char *path, char *full) {
  char link[64];
  ssize_t length;
  if (path && path[0] == '/') {
    snprintf(full, PATH_MAX, "%s", path);
  } else {
    if (fd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, full, PATH_MAX - 1);
    if (length < 0) return 0;
    full[length] = 0;
    if (path) snprintf(full + length, PATH_MAX - length, "/%s", path);
  }
  return strncmp(full, folder, strlen(folder)) == 0;
}

static int fails(const char *call, int fd, const char *path) {
  char full[PATH_MAX], line[PATH_MAX + 64];
  int before = errno, log, length;
  const char *name = getenv("FAILING_LOG");
  if (!armed || !below(fd, path, full)) return 0;
  count++;
  if (name && name[0]) {
    log = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_APPEND | O_CREAT, 0600);
    length = snprintf(line, sizeof line, "%s %s\n", call, full + strlen(folder));
    syscall(SYS_write, log, line, length);
    syscall(SYS_close, log);
  }
  errno = before;
  if (count != target && strcmp(call, lacking)) return 0;
  errno = failure;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(type, name, call, fd, path, parameters, arguments, failed) \
  type name parameters { return fails(call, fd, path) ? failed : REAL(name) arguments; }
#define OPEN(name, fd, parameters, arguments)                                                            \
  int name parameters {                                                                                  \
    va_list rest;                                                                                        \
    mode_t mode = 0;                                                                                     \
    va_start(rest, flags);                                                                               \
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t);                                      \
    va_end(rest);                                                                                        \
    return fails("open", fd, path) ? -1 : REAL(name) arguments;                                          \
  }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
OPEN(openat64, fd, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
CALL(FILE *, fopen, "open", AT_FDCWD, path, (const char *path, const char *mode), (path, mode), NULL)
CALL(FILE *, fopen64, "open", AT_FDCWD, path, (const char *path, const char *mode), (path, mode), NULL)
CALL(DIR *, opendir, "opendir", AT_FDCWD, path, (const char *path), (path), NULL)
CALL(DIR *, fdopendir, "opendir", fd, NULL, (int fd), (fd), NULL)
CALL(ssize_t, read, "read", fd, NULL, (int fd, void *data, size_t size), (fd, data, size), -1)
CALL(ssize_t, write, "write", fd, NULL, (int fd, const void *data, size_t size), (fd, data, size), -1)
CALL(ssize_t, writev, "write", fd, NULL, (int fd, const struct iovec *data, int parts), (fd, data, parts), -1)
CALL(int, fsync, "fsync", fd, NULL, (int fd), (fd), -1)
CALL(int, fdatasync, "fsync", fd, NULL, (int fd), (fd), -1)
CALL(int, ftruncate, "truncate", fd, NULL, (int fd, off_t size), (fd, size), -1)
CALL(int, ftruncate64, "truncate", fd, NULL, (int fd, off64_t size), (fd, size), -1)
CALL(int, flock, "flock", fd, NULL, (int fd, int operation), (fd, operation), -1)
CALL(int, rename, "rename", AT_FDCWD, path, (const char *path, const char *other), (path, other), -1)
CALL(int, mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), -1)
CALL(int, unlink, "unlink", AT_FDCWD, path, (const char *path), (path), -1)
CALL(int, unlinkat, "unlink", fd, path, (int fd, const char *path, int flags), (fd, path, flags), -1)
CALL(int, rmdir, "rmdir", AT_FDCWD, path, (const char *path), (path), -1)
CALL(int, chmod, "chmod", AT_FDCWD, path, (const char *path, mode_t mode), (path, mode), -1)
CALL(int, fchmod, "chmod", fd, NULL, (int fd, mode_t mode), (fd, mode), -1)
CALL(int, fchmodat, "chmod", fd, path, (int fd, const char *path, mode_t mode, int flags), (fd, path, mode, flags), -1)
