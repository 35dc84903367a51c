/* Pieces of documents -> where they lie; pages and mapped files -> tokens and labels at the places of the pieces; and
   what a microbatch makes of labels and spans. */
#include "native.h"

/* The digest that load.py compares. */
TM_EXPORT const char *tm_sources(void) { return TORCHMIX_SOURCES; }

/* ---- tm_locate: where pieces lie, by the tables of the catalog. */

/* A source, in 13 int64 of the array `sources`; addresses are of the catalog's own arrays. */
struct source {
    const int32_t *lengths; /* [num_documents] tokens of each */
    int64_t num_documents;
    const uint32_t *page_row, *page_start; /* [num_pages + 1] first row and first byte, counted from the chunk's */
    int64_t num_pages;
    const int64_t *chunk_page, *chunk_row; /* [num_chunks + 1] first page and first row */
    const int64_t *chunk_offset;           /* [num_chunks] first byte in the file */
    const int32_t *file_of_chunk;          /* [num_chunks] */
    int64_t num_chunks;
    int64_t token_bytes; /* of a token in its files; 0 where these hold more than tokens */
    int64_t first_file;  /* number of its first file among those of all sources */
    int64_t num_files;
};

struct tm_locate {
    struct tm_head head;
    struct tm_array sources; /* int64 [S * 13] */
    struct tm_array source;  /* int32 [n] */
    struct tm_array row;     /* int64 [n] */
    struct tm_array start;   /* int64 [n] first token in the document */
    struct tm_array tokens;  /* int64 [n] */
    struct tm_array order;   /* int64 [n] the pieces by source and row; all that is written is in this order */
    struct tm_array columns; /* int64 [8 * n], written: row, start, tokens, page, row in page, token of the file, file,
                                tokens of the document; token and file are 0 and -1 where files hold more than tokens */
    struct tm_array goes_on;     /* uint8 [n], written: whether the document has more tokens */
    struct tm_array first_piece; /* int64 [n], written: the first piece of each page */
    int64_t num_pages;           /* written: how many pages */
};

enum { TM_OUTSIDE = 1 }; /* a piece lies outside its source or document: the reference says which */

/* How many of ascending values are at most x. */
static int64_t not_above(const int64_t *values, int64_t n, int64_t x) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low;
}

static int64_t not_above_32(const uint32_t *values, int64_t n, uint32_t x) {
    int64_t low = 0, high = n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low;
}

static uint64_t sum_of(const int32_t *lengths, int64_t start, int64_t stop) {
    int64_t sum = 0;
    for (int64_t i = start; i < stop; i++) sum += lengths[i];
    return (uint64_t)sum;
}

TM_EXPORT int tm_locate(struct tm_locate *call) {
    TM_CHECK_SIZE(call);
    const int64_t n = call->order.n, num_sources = call->sources.n / 13;
    TM_CHECK(call, call->sources.n == 13 * num_sources, "not 13 numbers a source", call->sources.n);
    TM_CHECK(call, call->source.n == n && call->row.n == n && call->start.n == n && call->tokens.n == n &&
             call->columns.n == 8 * n && call->goes_on.n == n && call->first_piece.n == n, "not an entry per piece", n);
    const struct source *sources = call->sources.at;
    const int32_t *source_of = call->source.at;
    const int64_t *row_of = call->row.at, *start_of = call->start.at, *tokens_of = call->tokens.at;
    const int64_t *order = call->order.at;
    int64_t *found = call->columns.at, *first_piece = call->first_piece.at;
    uint8_t *goes_on = call->goes_on.at;
    int64_t source = -1, row = 0, chunk = 0, page = -1, first_row = 0;
    uint64_t before = 0; /* tokens of the page before `row` */
    call->num_pages = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = order[i];
        TM_CHECK(call, j >= 0 && j < n, "the order names no piece", i);
        TM_CHECK(call, source_of[j] >= 0 && source_of[j] < num_sources, "there is no such source", j);
        const struct source *of = sources + source_of[j];
        const int64_t r = row_of[j], start = start_of[j], tokens = tokens_of[j];
        if (r < 0 || r >= of->num_documents) return TM_OUTSIDE;
        const int64_t length = of->lengths[r];
        if (start < 0 || tokens < 0 || start > length || tokens > length - start) return TM_OUTSIDE;
        const int is_here = source_of[j] == source && r >= row;
        if (!is_here || r >= of->chunk_row[chunk + 1]) {
            chunk = not_above(of->chunk_row + 1, of->num_chunks, r);
            TM_CHECK(call, chunk < of->num_chunks && of->chunk_row[chunk] >= 0, "no chunk has the row", j);
        }
        const int64_t begin = of->chunk_page[chunk], end = of->chunk_page[chunk + 1], in_chunk = r - of->chunk_row[chunk];
        TM_CHECK(call, begin >= 0 && begin < end && end <= of->num_pages, "a chunk has other pages than the table", j);
        TM_CHECK(call, in_chunk >= 0 && in_chunk <= UINT32_MAX, "no chunk has the row", j);
        const int64_t at = begin - 1 + not_above_32(of->page_row + begin, end - begin, (uint32_t)in_chunk);
        TM_CHECK(call, at >= begin, "no page has the row", j);
        if (!is_here || at != page) {
            first_piece[call->num_pages++] = i;
            first_row = of->chunk_row[chunk] + of->page_row[at];
            before = 0;
            row = first_row;
        }
        source = source_of[j];
        page = at;
        int64_t token = 0, file = -1;
        if (of->token_bytes > 0) {
            before += sum_of(of->lengths, row, r);
            const uint64_t byte = (uint64_t)of->chunk_offset[chunk] + of->page_start[page];
            token = (int64_t)(byte / (uint64_t)of->token_bytes + before + (uint64_t)start);
            const int64_t in_source = of->file_of_chunk[chunk];
            TM_CHECK(call, in_source >= 0 && in_source < of->num_files, "there is no such file", j);
            file = of->first_file + in_source;
        }
        row = r;
        const int64_t values[] = {r, start, tokens, page, r - first_row, token, file, length};
        for (int c = 0; c < 8; c++) found[c * n + i] = values[c];
        goes_on[i] = start + tokens < length;
    }
    return TM_DONE;
}

/* ---- tm_gather: the tokens of pieces, to their places. */

/* An array of tokens, in 5 int64 of the array `runs`: of a mapped file, a page, or rows that were encoded. */
struct run {
    const char *values;
    int64_t n;
    int64_t type;           /* bytes of a value; negative where it is signed */
    const int64_t *offsets; /* [num_offsets] where each document begins in the values; or null */
    int64_t num_offsets;
};

/* Where pieces go, in 4 int64 of the array `outs`. */
struct out {
    char *tokens;
    int32_t *labels; /* or null: then tokens are values as they are */
    int64_t first;   /* its first place; each begins where the one before ends */
    int64_t n;
};

struct tm_gather {
    struct tm_head head;
    struct tm_array runs;      /* int64 [R * 5] */
    struct tm_array outs;      /* int64 [K * 4] */
    struct tm_array piece;     /* int64 [m] numbers of the pieces to copy, of n */
    struct tm_array run;       /* int64 [m] the run of each */
    struct tm_array begin;     /* int64 [n] where the piece begins in a run without offsets */
    struct tm_array row;       /* int64 [n] in a run with offsets: its document */
    struct tm_array start;     /* int64 [n] and its first token in the document */
    struct tm_array length;    /* int64 [n] its tokens */
    struct tm_array place;     /* int64 [n] where its first token belongs */
    struct tm_array goes_on;   /* uint8 [n] whether its document has more tokens */
    struct tm_array limit;     /* int64 [n] the bound that its ids, and the one behind it, must be below; or [0] */
    struct tm_array successor; /* int64 [n], written: the token behind it, or 0 */
    struct tm_array odd;       /* int64 [m * 4], written: number, kind, place in the piece and value of what is odd */
    struct tm_array gap_place; /* int64 [g] where all pieces of the outs begin, ascending; what lies between becomes */
    struct tm_array gap_length; /* int64 [g] padding; with no outs nothing does */
    int64_t num_odd;           /* written: how many pieces are odd */
    int64_t blanks;            /* whether to write padding; then outs have labels */
    int64_t type;              /* of values in outs without labels */
    int64_t no_loss;
};

enum { ODD_LIMIT = 1, ODD_NO_ID = 2 }; /* a value at or above the limit; a value that is no id, so the piece is blank */
enum { TM_OTHER_ROWS = 1 };            /* a page has not the document that a piece is of */

static void blank(int32_t *tokens, int32_t *labels, int64_t count, int32_t no_loss) {
    for (int64_t i = 0; i < count; i++) {
        tokens[i] = 0;
        labels[i] = no_loss;
    }
}

#define TYPES(X) X(-1, int8_t, uint8_t) X(1, uint8_t, uint8_t) X(-2, int16_t, uint16_t) X(2, uint16_t, uint16_t) \
    X(-4, int32_t, uint32_t) X(4, uint32_t, uint32_t) X(-8, int64_t, uint64_t) X(8, uint64_t, uint64_t)

/* The largest value, each read without its sign: a negative one is larger than any id. */
static uint64_t largest(int64_t type, const void *from, int64_t count) {
    switch (type) {
#define X(number, name, wide) \
    case number: { const wide *values = from; wide most = 0; \
        for (int64_t i = 0; i < count; i++) most = values[i] > most ? values[i] : most; \
        return most; }
        TYPES(X)
#undef X
    }
    return 0;
}

/* Whether a value read without its sign is an id below the limit. */
static int is_below(int64_t type, uint64_t value, uint64_t limit) {
    const int bits = (int)(type < 0 ? -8 * type : 8 * type);
    return value < limit && (type > 0 || !(value >> (bits - 1)));
}

static int64_t value_at(int64_t type, const void *from, int64_t i) {
    switch (type) {
#define X(number, name, wide) case number: return (int64_t)((const name *)from)[i];
        TYPES(X)
#undef X
    }
    return 0;
}

#define DEFINE_WIDEN(to) \
    static void widen_##to(int64_t type, const void *from, to *restrict out, int64_t count) { \
        switch (type) { TYPES(WIDEN_CASE) } \
    }
#define WIDEN_CASE(number, name, wide) \
    case number: for (int64_t i = 0; i < count; i++) WIDEN_ONE(name); break;
#define WIDEN_ONE(name) out[i] = (WIDEN_TO)((const name *)from)[i]
#define WIDEN_TO uint16_t
DEFINE_WIDEN(uint16_t)
#undef WIDEN_TO
#define WIDEN_TO int16_t
DEFINE_WIDEN(int16_t)
#undef WIDEN_TO
#define WIDEN_TO int32_t
DEFINE_WIDEN(int32_t)
#undef WIDEN_TO
#define WIDEN_TO uint32_t
DEFINE_WIDEN(uint32_t)
#undef WIDEN_TO
#define WIDEN_TO int64_t
DEFINE_WIDEN(int64_t)
#undef WIDEN_TO

/* Copies values as another type, which holds all of them. */
static void copy_as(int64_t to, void *out, int64_t type, const void *from, int64_t count) {
    if (to == type) memcpy(out, from, (size_t)(count * (type < 0 ? -type : type)));
    else if (to == 2) widen_uint16_t(type, from, out, count);
    else if (to == -2) widen_int16_t(type, from, out, count);
    else if (to == -4) widen_int32_t(type, from, out, count);
    else if (to == 4) widen_uint32_t(type, from, out, count);
    else widen_int64_t(type, from, out, count);
}

static int is_type(int64_t type) {
    const int64_t width = type < 0 ? -type : type;
    return width == 1 || width == 2 || width == 4 || width == 8;
}

static void note(struct tm_gather *call, int64_t piece, int64_t kind, const struct run *run, int64_t begin,
                 int64_t count, uint64_t limit) {
    int64_t *odd = (int64_t *)call->odd.at + 4 * call->num_odd++, at = 0;
    const char *from = run->values + begin * (run->type < 0 ? -run->type : run->type);
    while (at < count - 1) { /* one of them is odd: the last one, if no other */
        const int64_t value = value_at(run->type, from, at);
        if (value < 0 || (uint64_t)value >= limit) break;
        at++;
    }
    odd[0] = piece, odd[1] = kind, odd[2] = at, odd[3] = value_at(run->type, from, at);
}

static int write_padding(struct tm_gather *call) {
    const struct out *outs = call->outs.at;
    const int64_t num_outs = call->outs.n / 4, g = call->gap_place.n;
    const int64_t *place = call->gap_place.at, *length = call->gap_length.at;
    const int32_t no_loss = (int32_t)call->no_loss;
    int64_t i = 0;
    TM_CHECK(call, call->gap_length.n == g, "not an entry per piece", g);
    for (int64_t k = 0; k < num_outs; k++) {
        const struct out out = outs[k];
        int64_t filled = 0;
        TM_CHECK(call, out.labels != NULL, "padding has labels", k);
        for (; i < g && place[i] < out.first + out.n; i++) {
            const int64_t start = place[i] - out.first;
            TM_CHECK(call, tm_is_within(start, length[i], out.n), "a piece lies outside the step", i);
            TM_CHECK(call, start >= filled, "a piece lies over the one before it", i);
            blank((int32_t *)out.tokens + filled, out.labels + filled, start - filled, no_loss);
            filled = start + length[i];
        }
        blank((int32_t *)out.tokens + filled, out.labels + filled, out.n - filled, no_loss);
    }
    TM_CHECK(call, i == g, "a piece lies outside the step", i);
    return TM_DONE;
}

TM_EXPORT int tm_gather(struct tm_gather *call) {
    TM_CHECK_SIZE(call);
    const int64_t n = call->length.n, m = call->piece.n, num_runs = call->runs.n / 5, num_outs = call->outs.n / 4;
    TM_CHECK(call, call->runs.n == 5 * num_runs && call->outs.n == 4 * num_outs, "not so many numbers each", num_runs);
    TM_CHECK(call, call->begin.n == n && call->row.n == n && call->start.n == n && call->place.n == n &&
             call->goes_on.n == n && call->successor.n == n && (call->limit.n == n || call->limit.n == 0),
             "not an entry per piece", n);
    TM_CHECK(call, call->run.n == m && call->odd.n == 4 * m, "not an entry per piece to copy", m);
    const struct run *runs = call->runs.at;
    const struct out *outs = call->outs.at;
    const int64_t *piece = call->piece.at, *run_of = call->run.at, *begin_of = call->begin.at, *row_of = call->row.at;
    const int64_t *start_of = call->start.at, *length = call->length.at, *place = call->place.at;
    const int64_t *limit_of = call->limit.at;
    const uint8_t *goes_on = call->goes_on.at;
    int64_t *successor = call->successor.at;
    const int32_t no_loss = (int32_t)call->no_loss;
    call->num_odd = 0;
    for (int64_t k = 0, first = 0; k < num_outs; first = outs[k].first + outs[k].n, k++)
        TM_CHECK(call, outs[k].n >= 0 && outs[k].first == first && first <= INT64_MAX - outs[k].n,
                 "outs do not follow each other", k);
    TM_CHECK(call, is_type(call->type), "values of an unknown type", call->type);
    if (call->blanks) {
        const int ended = write_padding(call);
        if (ended) return ended;
    }
    for (int64_t e = 0; e < m; e++) {
        const int64_t i = piece[e];
        TM_CHECK(call, i >= 0 && i < n, "there is no such piece", e);
        TM_CHECK(call, run_of[e] >= 0 && run_of[e] < num_runs, "there is no such run", e);
        const struct run *run = runs + run_of[e];
        const int64_t count = length[i], behind = goes_on[i] ? 1 : 0;
        TM_CHECK(call, is_type(run->type), "values of an unknown type", run_of[e]);
        TM_CHECK(call, count >= 0 && count < INT64_MAX, "a piece of no length", i);
        int64_t begin = begin_of[i];
        if (run->offsets) {
            if (row_of[i] < 0 || row_of[i] >= run->num_offsets - 1) return tm_refuse(&call->head, "no such row", i);
            const int64_t from = run->offsets[row_of[i]], to = run->offsets[row_of[i] + 1];
            TM_CHECK(call, from >= 0 && from <= to && to <= run->n, "a page's documents lie outside it", i);
            if (!tm_is_within(start_of[i], count + behind, to - from)) {
                call->head.fault_at = i;
                return TM_OTHER_ROWS;
            }
            begin = from + start_of[i];
        }
        TM_CHECK(call, tm_is_within(begin, count + behind, run->n), "a piece lies outside its file or page", i);
        int64_t k = 0;
        while (k < num_outs && place[i] >= outs[k].first + outs[k].n) k++;
        if (k == num_outs && !count) { /* a piece of no tokens may lie at the end */
            successor[i] = behind ? value_at(run->type, run->values, begin) : 0;
            continue;
        }
        TM_CHECK(call, k < num_outs && tm_is_within(place[i] - outs[k].first, count, outs[k].n),
                 "a piece lies outside the step", i);
        const int64_t width = run->type < 0 ? -run->type : run->type, at = place[i] - outs[k].first;
        const char *from = run->values + begin * width;
        successor[i] = behind ? value_at(run->type, from, count) : 0;
        const int32_t *labels = outs[k].labels;
        uint64_t most = labels || limit_of ? largest(run->type, from, count) : 0;
        if (call->limit.n) {
            const uint64_t limit = (uint64_t)limit_of[i];
            if (!is_below(run->type, most, limit) || (behind && (uint64_t)successor[i] >= limit)) {
                note(call, i, ODD_LIMIT, run, begin, count + behind, limit);
                continue;
            }
        }
        if (!labels) {
            const int64_t wide = call->type < 0 ? -call->type : call->type;
            TM_CHECK(call, run->type == call->type || width < wide, "values of a type that holds others", run_of[e]);
            copy_as(call->type, outs[k].tokens + at * wide, run->type, from, count);
            continue;
        }
        int32_t *tokens = (int32_t *)outs[k].tokens + at, *label = outs[k].labels + at;
        if (count && !is_below(run->type, most, (uint64_t)INT32_MAX + 1)) {
            note(call, i, ODD_NO_ID, run, begin, count, (uint64_t)INT32_MAX + 1);
            blank(tokens, label, count, no_loss);
        } else if (count) {
            copy_as(-4, tokens, run->type, from, count);
            memcpy(label, tokens + 1, (size_t)(count - 1) * sizeof *label);
            label[count - 1] = behind ? (int32_t)successor[i] : no_loss;
        }
    }
    return TM_DONE;
}

/* --- Labels and spans of a microbatch -> its loss mask, positions and numbers of sources. */

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
