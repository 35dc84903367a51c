/* What the files of the fold share: places of streams, windows at hand, pieces, and memory for one step. */
#ifndef TORCHMIX_FOLD_H
#define TORCHMIX_FOLD_H

#include "native.h"

/* Documents of one window of a stream, in the order in which they are drawn; `Window` in mixture/windows.py. */
struct tm_window {
    struct tm_array row;    /* int64 [W] of the source */
    struct tm_array source; /* int64 [W]; empty: the stream has one */
    struct tm_array end;    /* int64 [W + 1] tokens of the documents before each */
    struct tm_array cost;   /* int64 [W + 1] what the documents before each cost; empty: their tokens */
    struct tm_array first;  /* int64 [W + 1] pieces of the documents before each; empty: each is one */
    struct tm_array whole;  /* int32 [W] tokens of each whole document; empty: as `end` has them */
    int64_t epoch, window;
    int64_t piece_tokens, unit_pieces;
    int64_t after_epoch, after_window; /* the place behind it */
    int64_t next;                      /* number of the window that is drawn from after it, or one of these */
};
enum { TM_NOT_AT_HAND = -1, TM_NO_WINDOW = -2 };

/* A piece, or a stretch of consecutive tokens of a document. */
struct tm_piece {
    int64_t stream, source, epoch, row, start, tokens, drawn_step, whole;
};
enum { TM_PIECE_COLUMNS = 8, TM_PLACED_COLUMNS = 11, TM_DIGESTED = 7, TM_POSITION = 5, TM_SUMS = 4 };

/* Tokens of all draws so far; `DrawnTokens` in planner/drawing.py. */
struct tm_drawn {
    int64_t raw, aligned;
};

enum { TM_CONCAT = 0, TM_BEST_FIT = 1, TM_PAD = 2, TM_WHOLE = 3 };

/* What ends a fold early. */
enum {
    TM_NEEDS_WINDOWS = 1, /* of the streams in `needed`, to plan the step after those that are done */
    TM_NEEDS_ROOM = 2,    /* for the results of that step, or for work on it */
    TM_BY_REFERENCE = 3,  /* that step is for the reference alone: a stream has run out */
    TM_EPOCH = 4          /* a stream has come to another epoch */
};

struct tm_fold {
    struct tm_head head;
    struct tm_array windows;          /* struct tm_window [W] */
    struct tm_array shares;           /* int64 [K, S] or [1, S]: of each step, or of all */
    struct tm_array samples;          /* int64 [K] samples of each step */
    struct tm_array pack_key;         /* uint64 [K] keys of the hashes of pieces */
    struct tm_array sample_key;       /* uint64 [K] keys of the numbers of samples */
    struct tm_array source_of_stream; /* int64 [S] */
    struct tm_array name_of_stream;   /* uint64 [S] hash of a stream and its first source */
    struct tm_array pair;             /* int64 [P] ascending: stream * num_sources + source, of streams with several */
    struct tm_array name_of_pair;     /* uint64 [P] */
    struct tm_array at;               /* int64 [S] read and written: the window that each stream is to draw from */
    struct tm_array position;         /* int64 [K + 1, 5, S]: epoch, window, offset, debt, residue; the first is read */
    struct tm_array marks;            /* int64 [K + 1, 8]: see enum tm_mark; the first is read */
    struct tm_array pool;     /* int64 [8, room] pieces deferred before each step; those of the first are read */
    struct tm_array drawn;    /* int64 [8, room] written: stretches drawn in each step */
    struct tm_array pieces;   /* int64 [11, room] written: pieces, sample, slot, sample offset */
    struct tm_array digested; /* int64 [room, 7] written: what the order digest is made of */
    struct tm_array sums;     /* int64 [K, 4, S] written: tokens asked, drawn, delivered, in the pool */
    struct tm_array left;     /* int64 [S] written: tokens left in the windows at hand */
    struct tm_array needed;   /* int64 [S] written: streams that lack windows */
    struct tm_array cuts;     /* int64 [sources] tokens at whose multiples documents of each are cut, at most `length`;
                               * 0: its documents flow, and are cut anywhere. Empty: `length` for all */
    struct tm_array work;     /* int64 */
    int64_t num_streams;
    int64_t num_sources;
    int64_t first_step;
    int64_t length;
    int64_t align_tokens;
    int64_t method;
    int64_t charge;        /* what a document costs; 0: its tokens */
    int64_t ends_at_epoch; /* whether a fold ends after a step in which a stream comes to another epoch */
    int64_t num_done;      /* written: steps */
    int64_t num_needed;    /* written */
};

/* Columns of `marks`; those of a step say where its parts of each table end. */
enum tm_mark {
    TM_POOL_END,
    TM_DRAWN_END,
    TM_PIECES_END,
    TM_RAW,
    TM_ALIGNED,
    TM_SAMPLES,
    TM_LABELLED,
    TM_UNUSED,
    TM_MARKS
};

/* Where all streams stand; the caches `at`, `next_tokens` and `near` decide nothing. Eight arrays [S], one after the
 * other. */
struct tm_stand {
    int64_t *epoch, *window, *offset, *debt, *residue, *at, *next_tokens, *near;
};
enum { TM_STAND = 8 };

/* Memory that is given out from its start on. */
struct tm_work {
    int64_t *at;
    int64_t left;
};

/* `count` entries; NULL if there is no room. */
static inline void *tm_take_room(struct tm_work *work, int64_t count) {
    if (count < 0 || count > work->left) return NULL;
    void *found = work->at;
    work->at += count;
    work->left -= count;
    return found;
}

/* One step on its way. */
struct tm_step {
    struct tm_fold *call;
    const struct tm_window *windows;
    const int64_t *shares;
    int64_t step, number; /* the step, and its number in this call */
    int64_t num_samples, capacity;
    struct tm_stand stand;
    struct tm_drawn totals;
    int64_t *asked;
    struct tm_piece *stretches; /* [room] drawn, and not yet in order of streams */
    int64_t num_stretches, room;
};

static inline int64_t tm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t tm_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t tm_aligned(int64_t tokens, int64_t align) {
    return align == 1 ? tokens : (tokens + align - 1) / align * align;
}

/* draw.c: all return 0, a reason to end, or TM_REFUSED. */
int tm_draw_step(struct tm_step *step);
void tm_left_tokens(const struct tm_step *step, int64_t *left);

/* pack.c */
int tm_pack_step(struct tm_step *step, struct tm_work work, const struct tm_piece *drawn, int64_t num_drawn);

#endif
