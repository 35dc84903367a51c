/* Some steps, one after the other: draw, pack, what the next one begins with; `Planner.fold` is the reference. */
#include "fold.h"

enum { MOST_SAMPLES = 1 << 30 };
static const int64_t MOST_TOKENS = (int64_t)1 << 60; /* of a debt, or of all documents of a window */
static const int64_t MOST_PIECE = (int64_t)1 << 31;

/* Whether a number is that of a window in use, or says that there is none. */
static int is_window(const struct tm_fold *call, int64_t number) {
    if (number < 0) return number >= TM_NO_WINDOW;
    return number < call->windows.n && ((const struct tm_window *)call->windows.at)[number].end.n > 0;
}

static int check_window(struct tm_fold *call, const struct tm_window *w, int64_t number) {
    const int64_t n = w->row.n;
    if (w->end.n == 0) return TM_DONE; /* a place of the table that is not in use */
    TM_CHECK(call, n >= 0 && w->end.n == n + 1, "a window has not an end per document", number);
    TM_CHECK(call, w->source.n == 0 || w->source.n == n, "a window has not a source per document", number);
    TM_CHECK(call, w->whole.n == 0 || w->whole.n == n, "a window has not a length per document", number);
    TM_CHECK(call, w->cost.n == 0 || (w->cost.n == n + 1 && w->first.n == 0), "a window has not a cost per document",
             number);
    TM_CHECK(call, w->first.n == 0 || w->first.n == n + 1, "a window has not a first piece per document", number);
    TM_CHECK(
        call,
        w->piece_tokens >= 1 && w->piece_tokens <= MOST_PIECE && w->unit_pieces >= 1 && w->unit_pieces <= MOST_PIECE,
        "a window's pieces have no tokens", number);
    TM_CHECK(call, is_window(call, w->next), "a window follows that there is not", number);
    const int64_t *end = w->end.at, *cost = w->cost.n ? w->cost.at : w->end.at, *first = w->first.at;
    TM_CHECK(call, end[0] == 0 && end[n] >= 0 && end[n] < MOST_TOKENS, "a window's tokens are not counted from 0",
             number);
    TM_CHECK(call, cost[0] == 0 && cost[n] >= 0 && cost[n] < MOST_TOKENS, "a window's costs are not counted from 0",
             number);
    TM_CHECK(call, !w->first.n || (first[0] == 0 && first[n] >= n && first[n] < MOST_TOKENS),
             "a window's pieces are not counted from 0", number);
    return TM_DONE;
}

/* Lengths of all arrays, and each value that addresses something. */
static int check(struct tm_fold *call) {
    TM_CHECK_SIZE(call);
    const int64_t S = call->num_streams, K = call->samples.n, pool_room = call->pool.n / TM_PIECE_COLUMNS;
    TM_CHECK(call, S >= 1 && S <= 1 << 20 && K >= 1 && K <= 1 << 20, "no streams, or no steps", S);
    TM_CHECK(call, call->shares.n == S || call->shares.n == K * S, "not a share per stream", call->shares.n);
    TM_CHECK(call, call->pack_key.n == K && call->sample_key.n == K, "not a key per step", K);
    TM_CHECK(call,
             call->source_of_stream.n == S && call->name_of_stream.n == S && call->at.n == S && call->left.n == S &&
                 call->needed.n == S,
             "not an entry per stream", S);
    TM_CHECK(call, call->cuts.n == 0 || (call->cuts.n == call->num_sources && call->method != TM_CONCAT),
             "not an entry per source", call->cuts.n);
    for (int64_t i = 0; i < call->cuts.n; i++) {
        const int64_t cut = ((const int64_t *)call->cuts.at)[i];
        TM_CHECK(call, cut >= (call->method != TM_BEST_FIT) && cut <= call->length, "a cut beyond a sample", i);
    }
    TM_CHECK(call, call->pair.n == call->name_of_pair.n, "not a name per pair", call->pair.n);
    TM_CHECK(call, call->position.n == (K + 1) * TM_POSITION * S && call->marks.n == (K + 1) * TM_MARKS,
             "not a place per step", K);
    TM_CHECK(call, call->sums.n == K * TM_SUMS * S, "not a sum per step", K);
    TM_CHECK(call,
             call->pool.n % TM_PIECE_COLUMNS == 0 && call->drawn.n % TM_PIECE_COLUMNS == 0 &&
                 call->pieces.n % TM_PLACED_COLUMNS == 0,
             "not a value per piece", call->pool.n);
    TM_CHECK(
        call,
        call->digested.n / TM_DIGESTED == call->pieces.n / TM_PLACED_COLUMNS && call->digested.n % TM_DIGESTED == 0,
        "not a row per piece", call->digested.n);
    TM_CHECK(call,
             call->length >= 1 && call->length <= MOST_SAMPLES && call->align_tokens >= 1 &&
                 call->length % call->align_tokens == 0,
             "a sample has no whole units", call->length);
    TM_CHECK(call, call->method >= TM_CONCAT && call->method <= TM_WHOLE, "an unknown way of packing", call->method);
    TM_CHECK(call, call->charge >= 0 && call->charge <= 1 << 30 && call->num_sources >= 0, "a charge out of bounds",
             call->charge);
    TM_CHECK(call, call->first_step >= 0 && call->first_step < MOST_TOKENS, "a step out of bounds", call->first_step);
    const int64_t *marks = call->marks.at, *at = call->at.at, *position = call->position.at, *shares = call->shares.at,
                  *samples = call->samples.at;
    TM_CHECK(call,
             tm_is_within(0, marks[TM_POOL_END], pool_room) && marks[TM_DRAWN_END] == 0 && marks[TM_PIECES_END] == 0,
             "the pool has no such end", 0);
    TM_CHECK(
        call,
        marks[TM_RAW] >= 1 && marks[TM_ALIGNED] >= 1 && marks[TM_RAW] < MOST_TOKENS && marks[TM_ALIGNED] < MOST_TOKENS,
        "totals out of bounds", 0);
    for (int64_t k = 0; k < K; k++)
        TM_CHECK(call, samples[k] >= 1 && samples[k] <= MOST_SAMPLES / call->length, "a batch out of bounds", k);
    for (int64_t i = 0; i < call->shares.n; i++)
        TM_CHECK(call, shares[i] >= 0 && shares[i] <= (int64_t)1 << 32, "a share out of bounds", i);
    for (int64_t s = 0; s < S; s++) {
        TM_CHECK(call, is_window(call, at[s]), "a stream is in no window", s);
        TM_CHECK(call, position[3 * S + s] < MOST_TOKENS && position[3 * S + s] > -MOST_TOKENS, "a debt out of bounds",
                 s);
        TM_CHECK(call, position[4 * S + s] >= 0 && position[4 * S + s] >> 32 == 0, "a residue out of bounds", s);
    }
    const int64_t *pool_tokens = (const int64_t *)call->pool.at + 5 * pool_room;
    for (int64_t i = 0; i < marks[TM_POOL_END]; i++)
        TM_CHECK(call, pool_tokens[i] >= 1 && pool_tokens[i] <= MOST_PIECE, "a piece has no tokens", i);
    for (int64_t w = 0; w < call->windows.n; w++) {
        const int refused = check_window(call, (const struct tm_window *)call->windows.at + w, w);
        if (refused) return refused;
    }
    return TM_DONE;
}

/* Stretches by stream, those that follow each other in a document joined -> the table of drawn ones, and back. */
static int in_order_of_streams(struct tm_step *step, struct tm_work *work, struct tm_piece **found, int64_t *count) {
    const int64_t S = step->call->num_streams, n = step->num_stretches;
    int64_t *starts = tm_take_room(work, S + 1);
    struct tm_piece *sorted = tm_take_room(work, n * TM_PIECE_COLUMNS);
    if (!starts || !sorted) return TM_NEEDS_ROOM;
    memset(starts, 0, (size_t)(S + 1) * sizeof *starts);
    for (int64_t i = 0; i < n; i++) starts[step->stretches[i].stream + 1]++;
    for (int64_t s = 0; s < S; s++) starts[s + 1] += starts[s];
    for (int64_t i = 0; i < n; i++) sorted[starts[step->stretches[i].stream]++] = step->stretches[i];
    *found = sorted;
    *count = 0;
    for (int64_t i = 0; i < n; i++) {
        struct tm_piece *last = sorted + *count - 1;
        const struct tm_piece *next = sorted + i;
        const int goes_on = *count && step->call->method != TM_PAD && last->stream == next->stream &&
                            last->epoch == next->epoch && last->source == next->source && last->row == next->row &&
                            last->start + last->tokens == next->start;
        if (goes_on)
            last->tokens += next->tokens;
        else
            sorted[(*count)++] = *next;
    }
    return 0;
}

static int keep_drawn(struct tm_step *step, const struct tm_piece *drawn, int64_t count) {
    struct tm_fold *call = step->call;
    int64_t *marks = (int64_t *)call->marks.at + step->number * TM_MARKS;
    const int64_t room = call->drawn.n / TM_PIECE_COLUMNS, first = marks[TM_DRAWN_END];
    if (!tm_is_within(first, count, room)) return TM_NEEDS_ROOM;
    for (int64_t i = 0; i < count; i++) {
        const int64_t *values = &drawn[i].stream;
        for (int c = 0; c < TM_PIECE_COLUMNS; c++) ((int64_t *)call->drawn.at)[c * room + first + i] = values[c];
    }
    marks[TM_DRAWN_END + TM_MARKS] = first + count;
    return 0;
}

static void add_by_stream(int64_t *sums, const struct tm_array *table, int64_t room, int64_t first, int64_t last) {
    const int64_t *stream = table->at, *tokens = stream + 5 * room;
    for (int64_t i = first; i < last; i++) sums[stream[i]] += tokens[i];
}

/* Tokens asked, drawn, delivered and deferred by stream, and the tokens of the step that have a label. */
static void sum_up(const struct tm_step *step) {
    const struct tm_fold *call = step->call;
    const int64_t S = call->num_streams, room = call->pieces.n / TM_PLACED_COLUMNS;
    int64_t *before = (int64_t *)call->marks.at + step->number * TM_MARKS, *after = before + TM_MARKS;
    int64_t *sums = (int64_t *)call->sums.at + step->number * TM_SUMS * S;
    memcpy(sums, step->asked, (size_t)S * sizeof *sums);
    memset(sums + S, 0, (size_t)(3 * S) * sizeof *sums);
    add_by_stream(sums + S, &call->drawn, call->drawn.n / TM_PIECE_COLUMNS, before[TM_DRAWN_END], after[TM_DRAWN_END]);
    add_by_stream(sums + 2 * S, &call->pieces, room, before[TM_PIECES_END], after[TM_PIECES_END]);
    add_by_stream(sums + 3 * S, &call->pool, call->pool.n / TM_PIECE_COLUMNS, before[TM_POOL_END], after[TM_POOL_END]);
    const int64_t *start = (const int64_t *)call->pieces.at + 4 * room, *tokens = start + room,
                  *whole = start + 3 * room;
    int64_t labelled = 0;
    for (int64_t i = before[TM_PIECES_END]; i < after[TM_PIECES_END]; i++)
        labelled += tokens[i] - (start[i] + tokens[i] == whole[i]);
    after[TM_RAW] = step->totals.raw;
    after[TM_ALIGNED] = step->totals.aligned;
    after[TM_LABELLED] = labelled;
    after[TM_UNUSED] = 0;
}

/* Writes where the streams stand after a step; whether one has come to another epoch. */
static int keep_places(const struct tm_step *step) {
    const struct tm_fold *call = step->call;
    const int64_t S = call->num_streams;
    const int64_t *before = (const int64_t *)call->position.at + step->number * TM_POSITION * S;
    int64_t *after = (int64_t *)call->position.at + (step->number + 1) * TM_POSITION * S;
    memcpy(after, step->stand.epoch, (size_t)(TM_POSITION * S) * sizeof *after);
    memcpy(call->at.at, step->stand.at, (size_t)S * sizeof *after);
    return memcmp(before, after, (size_t)S * sizeof *after) != 0;
}

static int fold_step(struct tm_step *step, struct tm_work work, int *has_other_epoch) {
    struct tm_piece *drawn;
    int64_t num_drawn;
    step->room = work.left / (2 * TM_PIECE_COLUMNS);
    step->stretches = (struct tm_piece *)work.at;
    int ended = tm_draw_step(step);
    if (ended) return ended;
    if (!tm_take_room(&work, step->num_stretches * TM_PIECE_COLUMNS)) return TM_NEEDS_ROOM;
    ended = in_order_of_streams(step, &work, &drawn, &num_drawn);
    if (!ended) ended = keep_drawn(step, drawn, num_drawn);
    if (!ended) ended = tm_pack_step(step, work, drawn, num_drawn);
    if (ended) return ended;
    sum_up(step);
    *has_other_epoch = keep_places(step);
    return 0;
}

/* Puts the streams where they stand before a step. */
static void stand_at(struct tm_step *step, int64_t number) {
    const struct tm_fold *call = step->call;
    const int64_t S = call->num_streams;
    memcpy(step->stand.epoch, (const int64_t *)call->position.at + number * TM_POSITION * S,
           (size_t)(TM_POSITION * S) * sizeof(int64_t));
    memcpy(step->stand.at, call->at.at, (size_t)S * sizeof(int64_t));
}

static void begin(struct tm_step *step, int64_t number) {
    const struct tm_fold *call = step->call;
    const int64_t S = call->num_streams, *marks = (const int64_t *)call->marks.at + number * TM_MARKS;
    step->step = call->first_step + number;
    step->number = number;
    step->shares = (const int64_t *)call->shares.at + (call->shares.n == S ? 0 : number * S);
    step->num_samples = ((const int64_t *)call->samples.at)[number];
    step->capacity = step->num_samples * call->length;
    step->totals = (struct tm_drawn){marks[TM_RAW], marks[TM_ALIGNED]};
    stand_at(step, number);
}

TM_EXPORT int tm_fold(struct tm_fold *call) {
    const int refused = check(call);
    if (refused) return refused;
    const int64_t S = call->num_streams;
    struct tm_work work = {call->work.at, call->work.n};
    struct tm_step step = {.call = call, .windows = call->windows.at};
    int64_t *stand = tm_take_room(&work, 2 * (TM_STAND + 1) * S); /* and memory for draws */
    step.asked = tm_take_room(&work, S);
    TM_CHECK(call, stand && step.asked, "not enough memory for the places of streams", call->work.n);
    step.stand = (struct tm_stand){stand,         stand + S,     stand + 2 * S, stand + 3 * S,
                                   stand + 4 * S, stand + 5 * S, stand + 6 * S, stand + 7 * S};
    memset(step.stand.next_tokens, 0, (size_t)(2 * S) * sizeof *stand); /* and `near` */
    int ended = TM_DONE, has_other_epoch = 0;
    call->num_done = call->num_needed = 0;
    while (!ended && call->num_done < call->samples.n) {
        begin(&step, call->num_done);
        ended = fold_step(&step, work, &has_other_epoch);
        if (!ended) call->num_done++;
        if (!ended && has_other_epoch && call->ends_at_epoch) ended = TM_EPOCH;
    }
    if (ended == TM_REFUSED) return ended;
    stand_at(&step, call->num_done);
    tm_left_tokens(&step, call->left.at);
    return ended;
}
