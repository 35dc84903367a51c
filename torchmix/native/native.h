/* What all C files share: arrays of the caller's, the head of a call, the check of an array's bounds. */
#ifndef TORCHMIX_NATIVE_H
#define TORCHMIX_NATIVE_H

#include <stdint.h>
#include <string.h>

/* An array of the caller's, contiguous; `n` counts elements. */
struct tm_array {
    void *at;
    int64_t n;
};

/* The first fields of each call. `fault` and `fault_at` say why a call was refused. */
struct tm_head {
    int64_t size; /* of the whole struct, as the caller knows it */
    const char *fault;
    int64_t fault_at;
};

/* Results of all calls; a call may have reasons of its own from 1 on. */
enum { TM_DONE = 0, TM_REFUSED = -1 };

#define TM_EXPORT __attribute__((visibility("default")))

static inline int tm_refuse(struct tm_head *head, const char *what, int64_t place) {
    head->fault = what;
    head->fault_at = place;
    return TM_REFUSED;
}

#define TM_CHECK(call, holds, what, place)                             \
    do {                                                               \
        if (!(holds)) return tm_refuse(&(call)->head, (what), (place)); \
    } while (0)

#define TM_CHECK_SIZE(call) \
    TM_CHECK(call, (call)->head.size == (int64_t)sizeof *(call), "the struct has another size", (call)->head.size)

/* Whether [start, start + count) lies in [0, n), for any values. */
static inline int tm_is_within(int64_t start, int64_t count, int64_t n) {
    return start >= 0 && count >= 0 && start <= n && count <= n - start;
}

#endif
