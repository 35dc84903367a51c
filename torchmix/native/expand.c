/* Labels and spans of a microbatch -> its loss mask, positions and numbers of sources. */
#include "native.h"

/* Each output may be missing; what it is made of is then not looked at. */
struct tm_expand {
    struct tm_head head;
    struct tm_array labels;      /* int32 [n] */
    struct tm_array spans;       /* int32 [k * 3] first place, first position and source of each, by place; from 0 on */
    struct tm_array mask;        /* float [n], written: 1 where there is a loss, else 0 */
    struct tm_array positions;   /* int64 [p], written: positions, 0 in padding */
    struct tm_array source;      /* int32 [p], written: numbers of sources */
    int64_t padding;             /* the source of padding */
};

/* Where span i of `spans` ends in [0, n), or -1 where the spans do not cover it in order. */
static int64_t end_of_span(const int32_t *spans, int64_t num_spans, int64_t i, int64_t n) {
    const int64_t start = spans[3 * i], stop = i + 1 < num_spans ? spans[3 * i + 3] : n;
    return start < 0 || stop < start || stop > n || (i == 0 && start != 0) ? -1 : stop;
}

TM_EXPORT int tm_expand(struct tm_expand *call) {
    TM_CHECK_SIZE(call);
    const int64_t n = call->labels.n, num_spans = call->spans.n / 3;
    const int32_t *labels = call->labels.at, *spans = call->spans.at;
    TM_CHECK(call, call->spans.n == 3 * num_spans, "not 3 numbers a span", call->spans.n);
    if (call->mask.at) {
        float *mask = call->mask.at;
        TM_CHECK(call, call->mask.n == n, "not an entry per label", call->mask.n);
        for (int64_t i = 0; i < n; i++) mask[i] = labels[i] < 0 ? 0.0f : 1.0f;
    }
    if (call->positions.at) {
        int64_t *positions = call->positions.at;
        const int64_t places = call->positions.n;
        TM_CHECK(call, num_spans > 0 || places == 0, "no span has the place", 0);
        for (int64_t k = 0; k < num_spans; k++) {
            const int64_t start = spans[3 * k], position = spans[3 * k + 1], stop = end_of_span(spans, num_spans, k, places);
            TM_CHECK(call, stop >= 0, "spans do not follow each other", k);
            if (spans[3 * k + 2] == call->padding) {
                memset(positions + start, 0, (size_t)(stop - start) * sizeof *positions);
                continue;
            }
            for (int64_t i = start; i < stop; i++) positions[i] = position + (i - start);
        }
    }
    if (call->source.at) {
        int32_t *source = call->source.at;
        const int64_t places = call->source.n;
        TM_CHECK(call, num_spans > 0 || places == 0, "no span has the place", 0);
        for (int64_t k = 0; k < num_spans; k++) {
            const int64_t stop = end_of_span(spans, num_spans, k, places);
            TM_CHECK(call, stop >= 0, "spans do not follow each other", k);
            for (int64_t i = spans[3 * k]; i < stop; i++) source[i] = spans[3 * k + 2];
        }
    }
    return TM_DONE;
}
