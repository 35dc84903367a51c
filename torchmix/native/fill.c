/* Values of a reader -> tokens and labels of a replica's step. */
#include "native.h"

/* The digest that load.py compares. */
TM_EXPORT const char *tm_sources(void) { return TORCHMIX_SOURCES; }

struct tm_fill {
    struct tm_head head;
    struct tm_array values;     /* [N] ids of `value_type`, each piece at its place */
    struct tm_array place;      /* int64 [n] where each piece begins, ascending; pieces do not overlap */
    struct tm_array length;     /* int64 [n] its tokens, 1 or more */
    struct tm_array ends;       /* uint8 [n] whether its last token is its document's */
    struct tm_array successor;  /* int64 [n] the id that follows it, where it does not end its document */
    struct tm_array tokens;     /* int32 [N], written: ids, 0 in padding */
    struct tm_array labels;     /* int32 [N], written: the next id of the document, or `no_loss` */
    struct tm_array bad;        /* int64 [n], written: numbers of pieces with a value that is no id */
    int64_t num_bad;            /* written: how many */
    int64_t value_type;         /* bytes of a value; negative where it is signed */
    int64_t no_loss;
};

static void blank(int32_t *tokens, int32_t *labels, int64_t count, int32_t no_loss) {
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = 0;
        labels[i] = no_loss;
    }
}

/* Copies ids to int32; whether all of them are ids. The bits of all together show one that is negative or too large. */
#define DEFINE_COPY(name, type, wide)                                        \
    static int name(const type *from, int32_t *restrict to, int64_t count) { \
        wide bits = 0;                                                       \
        for (int64_t i = 0; i < count; i++) {                                \
            bits |= (wide)from[i];                                           \
            to[i] = (int32_t)from[i];                                        \
        }                                                                    \
        return bits <= (wide)INT32_MAX;                                      \
    }
DEFINE_COPY(copy_i8, int8_t, uint32_t)
DEFINE_COPY(copy_u8, uint8_t, uint32_t)
DEFINE_COPY(copy_i16, int16_t, uint32_t)
DEFINE_COPY(copy_u16, uint16_t, uint32_t)
DEFINE_COPY(copy_i32, int32_t, uint32_t)
DEFINE_COPY(copy_u32, uint32_t, uint32_t)
DEFINE_COPY(copy_i64, int64_t, uint64_t)
DEFINE_COPY(copy_u64, uint64_t, uint64_t)

static int copy_ids(int64_t type, const char *from, int64_t at, int32_t *to, int64_t count) {
    switch (type) {
        case -1: return copy_i8((const int8_t *)from + at, to, count);
        case 1: return copy_u8((const uint8_t *)from + at, to, count);
        case -2: return copy_i16((const int16_t *)from + at, to, count);
        case 2: return copy_u16((const uint16_t *)from + at, to, count);
        case -4: return copy_i32((const int32_t *)from + at, to, count);
        case 4: return copy_u32((const uint32_t *)from + at, to, count);
        case -8: return copy_i64((const int64_t *)from + at, to, count);
        default: return copy_u64((const uint64_t *)from + at, to, count);
    }
}

TM_EXPORT int tm_fill(struct tm_fill *call) {
    TM_CHECK_SIZE(call);
    const int64_t n = call->place.n, num_tokens = call->tokens.n;
    const int64_t width = call->value_type < 0 ? -call->value_type : call->value_type;
    TM_CHECK(call, width == 1 || width == 2 || width == 4 || width == 8, "values of an unknown type", call->value_type);
    TM_CHECK(call, call->values.n == num_tokens && call->labels.n == num_tokens, "not a value per token", num_tokens);
    TM_CHECK(call, call->length.n == n && call->ends.n == n && call->successor.n == n && call->bad.n == n,
             "not an entry per piece", n);
    const int64_t *place = call->place.at, *length = call->length.at, *successor = call->successor.at;
    const uint8_t *ends = call->ends.at;
    int32_t *tokens = call->tokens.at, *labels = call->labels.at;
    const int32_t no_loss = (int32_t)call->no_loss;
    int64_t filled = 0;
    call->num_bad = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t start = place[i], count = length[i];
        TM_CHECK(call, count > 0 && tm_is_within(start, count, num_tokens), "a piece lies outside the step", i);
        TM_CHECK(call, start >= filled, "a piece lies over the one before it", i);
        blank(tokens + filled, labels + filled, start - filled, no_loss);
        filled = start + count;
        if (copy_ids(call->value_type, call->values.at, start, tokens + start, count)) {
            memcpy(labels + start, tokens + start + 1, (size_t)(count - 1) * sizeof *labels);
            labels[filled - 1] = ends[i] ? no_loss : (int32_t)successor[i];
        } else {
            blank(tokens + start, labels + start, count, no_loss);
            ((int64_t *)call->bad.at)[call->num_bad++] = i;
        }
    }
    blank(tokens + filled, labels + filled, num_tokens - filled, no_loss);
    return TM_DONE;
}
