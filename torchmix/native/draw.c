/* What a step draws from its streams; mixture/draw.py and planner/drawing.py are the reference. */
#include "fold.h"

static const int64_t MOST_ASKED = (int64_t)1 << 30;
static const int64_t MOST_ALIGNED = (int64_t)1 << 40;
static const int64_t NEVER = -((int64_t)1 << 62);
enum { MOST_ROUNDS = 1 << 10 }; /* of one step; beyond it the reference goes on */

/* The first index in (from, n) whose value is `target` or more, or n; ascending values, that at `from` is less. */
static int64_t first_from(const int64_t *values, int64_t from, int64_t n, int64_t target) {
    int64_t stride = 1, low = from, high = from + 1;
    while (high < n && values[high] < target) { /* the place is near, as a step takes few documents of a window */
        low = high;
        stride *= 2;
        high = stride < n - low ? low + stride : n;
    }
    high = tm_min(high, n);
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (values[middle] < target)
            low = middle;
        else
            high = middle;
    }
    return high;
}

/* The document in [0, n) that a piece lies in, looked for from document `near` on. */
static int64_t document_of(const int64_t *first, int64_t n, int64_t piece, int64_t near) {
    int64_t low = near > 0 && near < n && first[near] <= piece ? near : 0, stride = 1;
    while (stride < n - low && first[low + stride] <= piece) {
        low += stride;
        stride *= 2;
    }
    int64_t high = stride < n - low ? low + stride : n;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (first[middle] <= piece)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int64_t num_pieces(const struct tm_window *w) {
    return w->first.n ? ((const int64_t *)w->first.at)[w->row.n] : w->row.n;
}

static const int64_t *costs(const struct tm_window *w) { return w->cost.n ? w->cost.at : w->end.at; }

/* Where a piece begins: its document, and the pieces and the tokens, or what they cost, before it. */
struct place {
    int64_t document, inside, before;
};

static struct place place_of(const struct tm_window *w, int64_t piece, int64_t near) {
    const int64_t *ends = costs(w);
    if (!w->first.n) return (struct place){piece, 0, ends[piece]};
    const int64_t *first = w->first.at;
    if (piece >= first[w->row.n]) return (struct place){w->row.n, 0, ends[w->row.n]};
    const int64_t d = document_of(first, w->row.n, piece, near), inside = piece - first[d];
    /* A document that is hidden counts for nothing and keeps its pieces: it ends before the next piece. */
    return (struct place){d, inside, inside ? tm_min(ends[d] + inside * w->piece_tokens, ends[d + 1]) : ends[d]};
}

/* Tokens of a piece with those that are drawn together with it, or what it costs. */
static int64_t tokens_at(const struct tm_window *w, struct place at) {
    const int64_t *ends = costs(w);
    const int64_t all = ends[at.document + 1] - ends[at.document];
    if (!w->first.n) return all;
    const int64_t units = w->unit_pieces - at.inside % w->unit_pieces;
    return tm_max(0, tm_min(all - at.inside * w->piece_tokens, units * w->piece_tokens));
}

/* Adds a stretch; one of no tokens is left out. */
static int add_stretch(struct tm_step *step, int64_t s, const struct tm_window *w, int64_t document, int64_t start,
                       int64_t tokens) {
    if (tokens == 0) return 0;
    if (step->num_stretches == step->room) return TM_NEEDS_ROOM;
    const int64_t *ends = w->end.at;
    step->stretches[step->num_stretches++] = (struct tm_piece){
        .stream = s,
        .source = w->source.n ? ((const int64_t *)w->source.at)[document]
                              : ((const int64_t *)step->call->source_of_stream.at)[s],
        .epoch = w->epoch,
        .row = ((const int64_t *)w->row.at)[document],
        .start = start,
        .tokens = tokens,
        .drawn_step = step->step,
        .whole = w->whole.n ? ((const int32_t *)w->whole.at)[document] : ends[document + 1] - ends[document],
    };
    return 0;
}

/* Takes pieces of a window while the midpoint of the next one lies below the debt; `Window.take` and `stretches`. */
static int take(struct tm_step *step, int64_t s, const struct tm_window *w, int64_t *offset, int64_t *debt) {
    const int64_t n = w->row.n, *ends = costs(w), *tokens = w->end.at, *first = w->first.at;
    const struct place from = place_of(w, *offset, step->stand.near[s]);
    const int64_t target = from.before + *debt;
    const int64_t behind = first_from(ends, tm_min(from.document, n), n + 1, target);
    int64_t last = behind, stop, after; /* documents before `last` give; the last of them up to `after` */
    if (behind > n) {
        last = n;
        stop = num_pieces(w);
        after = ends[n];
    } else if (!w->first.n) {
        if (ends[behind - 1] + ends[behind] >= 2 * target) last = behind - 1;
        stop = last;
        after = ends[last];
    } else {
        const int64_t inside = target - ends[behind - 1], size = w->piece_tokens * w->unit_pieces;
        const int64_t whole = (inside - 1) / size; /* units of the last document that end below the target */
        int64_t begin = tm_max(whole * size, from.before - ends[behind - 1]);
        const int64_t end = tm_min((whole + 1) * size, ends[behind] - ends[behind - 1]);
        if (begin + end < 2 * inside) begin = end;
        const int64_t pieces = (begin + w->piece_tokens - 1) / w->piece_tokens;
        if (pieces == 0) last = behind - 1;
        stop = first[behind - 1] + pieces;
        after = ends[behind - 1] + begin;
    }
    TM_CHECK(step->call, stop >= *offset && stop <= num_pieces(w), "a window's documents are not in order", s);
    if (stop > *offset) {
        for (int64_t d = from.document; d < last; d++) {
            const int64_t begin = w->first.n && d == from.document ? from.before : tokens[d];
            const int64_t end = w->first.n && d == last - 1 ? after : tokens[d + 1];
            const int failed = add_stretch(step, s, w, d, begin - tokens[d], end - begin);
            if (failed) return failed;
        }
        *debt -= after - from.before;
        *offset = stop;
        step->stand.near[s] = last - 1;
    }
    return 0;
}

/* The window that a stream is to draw from, with its place in `stand`; NULL: there is none at hand. */
static const struct tm_window *window_of(const struct tm_step *step, int64_t s) {
    const struct tm_stand *stand = &step->stand;
    if (stand->at[s] < 0) return NULL;
    const struct tm_window *w = step->windows + stand->at[s];
    if (stand->epoch[s] != w->epoch || stand->window[s] != w->window) { /* windows between have no used rows */
        stand->epoch[s] = w->epoch;
        stand->window[s] = w->window;
        stand->offset[s] = stand->near[s] = 0;
    }
    return w;
}

static void end_window(const struct tm_stand *stand, int64_t s, const struct tm_window *w) {
    stand->epoch[s] = w->after_epoch;
    stand->window[s] = w->after_window;
    stand->offset[s] = stand->near[s] = 0;
    stand->at[s] = w->next;
}

static int lacks_window(const struct tm_step *step, int64_t s) {
    if (step->stand.at[s] == TM_NO_WINDOW) return TM_BY_REFERENCE;
    struct tm_fold *call = step->call;
    ((int64_t *)call->needed.at)[call->num_needed++] = s;
    return TM_NEEDS_WINDOWS;
}

/* Takes what a stream owes, window by window. */
static int pay(struct tm_step *step, int64_t s) {
    const struct tm_stand *stand = &step->stand;
    stand->next_tokens[s] = 0;
    for (int64_t hops = 0; stand->debt[s] > 0; hops++) {
        const struct tm_window *w = window_of(step, s);
        if (w == NULL) return lacks_window(step, s);
        TM_CHECK(step->call, hops <= step->call->windows.n, "windows follow each other in a circle", s);
        TM_CHECK(step->call, tm_is_within(stand->offset[s], 0, num_pieces(w)), "a place lies outside its window", s);
        const int failed = take(step, s, w, &stand->offset[s], &stand->debt[s]);
        if (failed) return failed;
        if (stand->offset[s] < num_pieces(w)) { /* the debt is paid: the next piece's midpoint lies beyond it */
            stand->next_tokens[s] = tokens_at(w, place_of(w, stand->offset[s], stand->near[s]));
            break;
        }
        end_window(stand, s, w);
    }
    return 0;
}

/* One draw: each stream is charged its share of what is asked, and pays. */
static int draw(struct tm_step *step, int64_t asked_tokens, int64_t *asked) {
    const struct tm_stand *stand = &step->stand;
    int ended = 0;
    step->call->num_needed = 0;
    for (int64_t s = 0; s < step->call->num_streams; s++) {
        const int64_t charged = stand->residue[s] + step->shares[s] * asked_tokens;
        asked[s] = charged >> 32;
        stand->residue[s] = charged & 0xFFFFFFFF;
        stand->debt[s] += asked[s];
        /* Less than half the next piece owed gives nothing. */
        if (stand->debt[s] <= 0 || step->shares[s] <= 0 || 2 * stand->debt[s] <= stand->next_tokens[s]) continue;
        const int failed = pay(step, s);
        if (failed == TM_NEEDS_WINDOWS && ended != TM_BY_REFERENCE)
            ended = failed; /* go on: others may lack one, too */
        else if (failed == TM_BY_REFERENCE)
            ended = failed;
        else if (failed)
            return failed;
    }
    return ended;
}

/* What stretches cost their streams, and the tokens that they take in samples. */
static void sums_of(const struct tm_step *step, int64_t from, int64_t *raw, int64_t *aligned) {
    const struct tm_fold *call = step->call;
    *raw = *aligned = 0;
    for (int64_t i = from; i < step->num_stretches; i++) {
        *raw += call->charge ? call->charge : step->stretches[i].tokens;
        *aligned += tm_aligned(step->stretches[i].tokens, call->align_tokens);
    }
}

static int64_t to_ask(struct tm_drawn totals, int64_t need) {
    const __int128 wide = (__int128)need * totals.raw; /* up to 2^30 times 2^40 */
    const __int128 asked = (wide + totals.aligned - 1) / totals.aligned;
    return asked < 1 ? 1 : asked > MOST_ASKED ? MOST_ASKED : (int64_t)asked;
}

static struct tm_drawn plus(struct tm_drawn totals, int64_t raw, int64_t aligned) {
    totals.raw += raw;
    totals.aligned += aligned;
    while (totals.aligned > MOST_ALIGNED) {
        totals.raw /= 2;
        totals.aligned /= 2;
    }
    return totals;
}

/* Tokens to ask for when a draw is repeated; 0 if the draw counts. */
static int64_t ask_less(int64_t asked, int64_t need, int64_t raw, int64_t aligned, int64_t capacity) {
    if (aligned - tm_max(raw, need) <= capacity / 4) return 0;
    const __int128 less = (__int128)need * raw / aligned;
    return less >= 1 && less < asked ? (int64_t)less : 0;
}

/* The draw that counts when `need` aligned tokens are missing; `before` and `asked` are memory for it. */
static int draw_tokens(struct tm_step *step, int64_t need, int64_t *before, int64_t *asked, int64_t *have) {
    const int64_t S = step->call->num_streams, num_before = step->num_stretches;
    int64_t raw = 0, aligned = 0;
    memcpy(before, step->stand.epoch, (size_t)(TM_STAND * S) * sizeof *before);
    for (int64_t ask = to_ask(step->totals, need); ask;) {
        const int ended = draw(step, ask, asked);
        if (ended) return ended;
        sums_of(step, num_before, &raw, &aligned);
        ask = ask_less(ask, need, raw, aligned, step->capacity);
        if (ask) {
            memcpy(step->stand.epoch, before, (size_t)(TM_STAND * S) * sizeof *before);
            step->num_stretches = num_before;
        }
    }
    for (int64_t s = 0; s < S; s++) step->asked[s] += asked[s];
    step->totals = plus(step->totals, raw, aligned);
    *have += aligned;
    return 0;
}

/* The next piece of a stream that has tokens; what it costs, if documents are not charged, comes out in `tokens`. */
static int next_document(struct tm_step *step, int64_t s, int64_t *tokens) {
    const struct tm_stand *stand = &step->stand;
    for (int64_t hops = 0;;) {
        const struct tm_window *w = window_of(step, s);
        if (w == NULL) return lacks_window(step, s);
        const int64_t offset = stand->offset[s], pieces = num_pieces(w);
        TM_CHECK(step->call, tm_is_within(offset, 0, pieces), "a place lies outside its window", s);
        if (offset == pieces) {
            TM_CHECK(step->call, hops++ <= step->call->windows.n, "windows follow each other in a circle", s);
            end_window(stand, s, w);
            continue;
        }
        const struct place at = place_of(w, offset, stand->near[s]);
        stand->near[s] = at.document;
        const int64_t *end = w->end.at, *first = w->first.at;
        const int64_t counted = end[at.document + 1] - end[at.document];
        int64_t count = 1, begin = 0;
        *tokens = counted;
        if (w->first.n) {
            const int64_t of_document = first[at.document + 1] - first[at.document];
            const int64_t after = tm_min((at.inside / w->unit_pieces + 1) * w->unit_pieces, of_document);
            count = after - at.inside;
            begin = tm_min(at.inside * w->piece_tokens, counted);
            *tokens = tm_min(after * w->piece_tokens, counted) - begin;
        }
        TM_CHECK(step->call, tm_is_within(offset, count, pieces) && count, "a window's pieces are not in order", s);
        const int failed = add_stretch(step, s, w, at.document, begin, *tokens);
        if (failed) return failed;
        stand->offset[s] += count;
        if (stand->offset[s] == pieces) end_window(stand, s, w);
        if (*tokens) return 0; /* a document that counts for nothing keeps its place, and is passed over */
    }
}

/* So many documents, each from the stream that owes most; `draw_documents` in mixture/draw.py. */
static int draw_documents(struct tm_step *step, int64_t count, int64_t *debt, int64_t *paid) {
    const struct tm_fold *call = step->call;
    const struct tm_stand *stand = &step->stand;
    const int64_t S = call->num_streams;
    step->call->num_needed = 0;
    for (int64_t s = 0; s < S; s++) { /* debts in 2^-32 of a token, as the shares */
        debt[s] = (int64_t)((uint64_t)stand->debt[s] << 32) + stand->residue[s];
        paid[s] = 0;
    }
    while (step->num_stretches < count) {
        int64_t most = 0, largest = step->shares[0] > 0 ? debt[0] : NEVER;
        for (int64_t s = 1; s < S; s++) {
            const int64_t owed = step->shares[s] > 0 ? debt[s] : NEVER;
            if (owed > largest) {
                largest = owed;
                most = s;
            }
        }
        int64_t tokens;
        const int failed = next_document(step, most, &tokens);
        if (failed) return failed;
        const int64_t cost = call->charge ? call->charge : tokens;
        paid[most] += cost;
        for (int64_t s = 0; s < S; s++) debt[s] += step->shares[s] * cost;
        debt[most] -= (int64_t)((uint64_t)cost << 32);
    }
    for (int64_t s = 0; s < S; s++) {
        step->asked[s] = (debt[s] >> 32) + paid[s] - stand->debt[s];
        stand->debt[s] = debt[s] >> 32;
        stand->residue[s] = debt[s] & 0xFFFFFFFF;
        stand->next_tokens[s] = 0;
    }
    int64_t raw, aligned;
    sums_of(step, 0, &raw, &aligned);
    step->totals = plus(step->totals, raw, aligned);
    return 0;
}

int tm_draw_step(struct tm_step *step) {
    const struct tm_fold *call = step->call;
    const int64_t S = call->num_streams;
    int64_t *spare = step->stand.epoch + TM_STAND * S; /* [7 S] and [S] behind the places */
    step->num_stretches = 0;
    memset(step->asked, 0, (size_t)S * sizeof *step->asked);
    if (call->method == TM_PAD) return draw_documents(step, step->num_samples, spare, spare + S);
    const int64_t *marks = (const int64_t *)call->marks.at + step->number * TM_MARKS;
    const int64_t first = step->number ? marks[TM_POOL_END - TM_MARKS] : 0, room = call->pool.n / TM_PIECE_COLUMNS;
    const int64_t *pool_tokens = (const int64_t *)call->pool.at + 5 * room;
    int64_t have = 0;
    for (int64_t i = first; i < marks[TM_POOL_END]; i++) have += tm_aligned(pool_tokens[i], call->align_tokens);
    /* Each further draw asks for a sample or more: a few tokens would fall below every stream's midpoint. */
    for (int64_t rounds = 0; have < step->capacity; rounds++) {
        if (rounds == MOST_ROUNDS) return TM_BY_REFERENCE;
        const int64_t need = tm_max(step->capacity - have, rounds ? call->length : 0);
        const int ended = draw_tokens(step, need, spare, spare + TM_STAND * S, &have);
        if (ended) return ended;
    }
    return 0;
}

/* What each stream can pay with the windows at hand; -1 where no window follows them. */
void tm_left_tokens(const struct tm_step *step, int64_t *left) {
    const struct tm_stand *stand = &step->stand;
    for (int64_t s = 0; s < step->call->num_streams; s++) {
        int64_t at = stand->at[s], sum = 0;
        for (int64_t hops = 0; at >= 0 && hops <= step->call->windows.n; hops++) {
            const struct tm_window *w = step->windows + at;
            const int is_here = w->epoch == stand->epoch[s] && w->window == stand->window[s];
            const int64_t offset = is_here && hops == 0 ? tm_min(tm_max(stand->offset[s], 0), num_pieces(w)) : 0;
            sum += costs(w)[w->row.n] - place_of(w, offset, 0).before;
            at = w->next;
        }
        left[s] = at == TM_NO_WINDOW ? -1 : sum;
    }
}
