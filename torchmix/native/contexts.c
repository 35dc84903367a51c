/* Samples of any length -> bins of runs of ranks. The reference, planner/contexts.py, says what each part is for. */
#include "native.h"
#include <stdlib.h>

struct tm_contexts {
    struct tm_head head;
    struct tm_array tokens;        /* int64 [n] of each sample, in [1, 2^40] */
    struct tm_array sizes;         /* int64 [S] ranks of a run, ascending, at most num_ranks; the last holds any sample */
    struct tm_array bin_of_sample; /* int64 [n], written */
    struct tm_array row_of_bin;    /* int64 [n], the first num_bins written, and so the next three */
    struct tm_array size_of_bin;
    struct tm_array load_of_bin;
    struct tm_array tokens_of_bin;
    int64_t per_token, per_pair, per_exchanged, per_microbatch;
    int64_t rank_tokens, align, num_ranks, stages, microbatches_of;
    int64_t num_bins, num_rows, cost, lower_bound; /* written */
    int64_t in_order_cost; /* written: of samples by number, in the shortest runs that hold them all */
    int64_t in_order_size; /* written: 0, or the size of runs in which samples by number are the cheapest; no bins then */
};

enum { MOST_SIZES = 64, MORE_ROWS = 4, NUM_ABOVE = 8, DIGIT = 11, NUMBER_BITS = 31, MOST_ARRAYS = 4 * MOST_SIZES };
static const int64_t ABOVE[NUM_ABOVE] = {0, 1, 2, 4, 8, 16, 32, 64};
#define MOST ((int64_t)1 << 62)

/* --- Memory of a call. */

struct arena {
    void *arrays[MOST_ARRAYS];
    int count, has_failed;
};

static int64_t *reserve(struct arena *arena, int64_t count) {
    int64_t *found = arena->count < MOST_ARRAYS ? malloc((size_t)(count > 0 ? count : 1) * sizeof *found) : NULL;
    if (found) arena->arrays[arena->count++] = found;
    else arena->has_failed = 1;
    return found;
}

static void release(struct arena *arena) {
    while (arena->count) free(arena->arrays[--arena->count]);
}

/* --- The distinct lengths of a step. */

struct bins {
    int64_t *row, *size, *load, *tokens, num_bins;
    int64_t *of_take, *length, *count, num_takes; /* a bin takes so many samples of a length */
};

struct way {
    int from, to; /* its sizes */
    int first_size;
    int64_t *work, *least, *own;
    int64_t total_work, total_own, one_by_one;
};

struct waiting {
    int64_t *count, *below;
    int64_t work, own;
};

struct step {
    const struct tm_contexts *call;
    const int64_t *sizes;
    int num_sizes;
    int64_t *by_length;       /* [n] numbers of samples, the shortest first */
    int64_t *length, *counts; /* [num_lengths] ascending, and samples of each */
    int64_t num_lengths;
    int64_t *load[MOST_SIZES], *padded[MOST_SIZES]; /* [num_lengths] by size */
    struct way way;
    struct waiting waiting, trial;
    struct bins bins, best;
    int64_t num_rows, best_rows, best_cost, in_order_size;
};

static int64_t up(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Runs of a size. Most sizes are powers of two, of which a shift is a tenth of a division. */
struct run {
    int64_t size, multiple;
    int shift, shift_of_multiple; /* -1: no power of two */
};

static int shift_of(int64_t value) { return value & (value - 1) ? -1 : __builtin_ctzll((uint64_t)value); }

static struct run run_of(const struct tm_contexts *call, int64_t size) {
    const int64_t multiple = call->align * (size > 1 ? 2 * size : 1);
    return (struct run){size, multiple, shift_of(size), shift_of(multiple)};
}

static int64_t part(int64_t value, int64_t divisor, int shift) { return shift < 0 ? value / divisor : value >> shift; }

static int64_t padded_to(const struct run *run, int64_t tokens) {
    return part(tokens + run->multiple - 1, run->multiple, run->shift_of_multiple) * run->multiple;
}

static int64_t load_of(const struct tm_contexts *call, const struct run *run, int64_t tokens, int64_t padded) {
    const int64_t work = call->per_token * padded + call->per_pair * tokens * tokens;
    return part(work + run->size - 1, run->size, run->shift) +
           call->per_exchanged * (part(padded, run->size, run->shift) * (run->size - 1));
}

/* Radix sort of the numbers of samples by their tokens, each below 2^32, so that both are one word; `keys` and `other`
 * are as long, and lost. Returns the tokens, sorted. */
static const int64_t *sort_by_length(const int64_t *tokens, int64_t n, int64_t longest, int64_t *order, int64_t *keys,
                                     int64_t *other) {
    int64_t *from = keys, *to = other;
    for (int64_t i = 0; i < n; i++) from[i] = tokens[i] << NUMBER_BITS | i;
    for (int shift = 0; longest >> shift; shift += DIGIT) {
        int64_t start[(1 << DIGIT) + 1] = {0};
        const int64_t mask = (1 << DIGIT) - 1;
        for (int64_t i = 0; i < n; i++) start[(from[i] >> (NUMBER_BITS + shift) & mask) + 1]++;
        for (int64_t d = 0; d < mask; d++) start[d + 1] += start[d];
        for (int64_t i = 0; i < n; i++) to[start[from[i] >> (NUMBER_BITS + shift) & mask]++] = from[i];
        int64_t *const swapped = from;
        from = to;
        to = swapped;
    }
    for (int64_t i = 0; i < n; i++) {
        order[i] = from[i] & (((int64_t)1 << NUMBER_BITS) - 1);
        from[i] >>= NUMBER_BITS;
    }
    return from;
}

static void count_lengths(struct step *step, const int64_t *sorted, int64_t n) {
    int64_t last = 0;
    step->num_lengths = 0;
    for (int64_t i = 0; i < n; i++) {
        if (sorted[i] != last) {
            step->length[step->num_lengths] = last = sorted[i];
            step->counts[step->num_lengths++] = 0;
        }
        step->counts[step->num_lengths - 1]++;
    }
}

/* What a sample of each length costs and takes in runs of a size; whether each sample costs less than 2^62. */
static int fill_table(struct step *step, int s) {
    const struct tm_contexts *call = step->call;
    const int64_t size = step->sizes[s], longest = step->length[step->num_lengths - 1];
    const struct run run = run_of(call, size);
    const int64_t padded = padded_to(&run, longest);
    int64_t a, b;
    if (__builtin_mul_overflow(call->per_token, padded, &a) || __builtin_mul_overflow(longest, longest, &b) ||
        __builtin_mul_overflow(call->per_pair, b, &b) || __builtin_add_overflow(a, b, &a) ||
        __builtin_mul_overflow(padded, size - 1, &b) || __builtin_mul_overflow(call->per_exchanged, b, &b) ||
        __builtin_add_overflow(a, b, &a) || a >= MOST - size)
        return 0;
    for (int64_t i = 0; i < step->num_lengths; i++) {
        step->padded[s][i] = padded_to(&run, step->length[i]);
        step->load[s][i] = load_of(call, &run, step->length[i], step->padded[s][i]);
    }
    return 1;
}

/* Whether each sample in the run that is dearest for a rank, one after the other and in each stage, costs less. */
static int fits_ranks(const struct step *step) {
    int64_t a, total = 0;
    for (int64_t i = 0; i < step->num_lengths; i++) {
        int64_t most = 0;
        for (int s = 0; s < step->num_sizes; s++) most = most_of(most, step->load[s][i]);
        if (__builtin_mul_overflow(most, step->counts[i], &a) || __builtin_add_overflow(total, a, &total)) return 0;
    }
    return !__builtin_mul_overflow(total, step->call->stages + 1, &a) && a < MOST;
}

/* --- Runs of some sizes. */

/* Whether all samples together cost less than 2^62, and take fewer tokens. */
static int enter_way(struct step *step, int from, int to) {
    const struct tm_contexts *call = step->call;
    struct way *way = &step->way;
    way->from = from, way->to = to, way->first_size = from;
    way->total_work = way->total_own = way->one_by_one = 0;
    for (int64_t i = 0; i < step->num_lengths; i++) {
        while (step->padded[way->first_size][i] > call->rank_tokens * step->sizes[way->first_size]) way->first_size++;
        int64_t work = INT64_MAX, least = INT64_MAX;
        for (int s = way->first_size; s < to; s++) {
            work = least_of(work, step->load[s][i] * step->sizes[s]);
            least = least_of(least, step->load[s][i]);
        }
        way->work[i] = work;
        way->least[i] = least;
        way->own[i] = step->padded[way->first_size][i];
        int64_t a;
        if (__builtin_mul_overflow(work, step->counts[i], &a) ||
            __builtin_add_overflow(way->total_work, a, &way->total_work) || way->total_work >= MOST ||
            __builtin_mul_overflow(way->own[i], step->counts[i], &a) ||
            __builtin_add_overflow(way->total_own, a, &way->total_own) || way->total_own >= MOST)
            return 0;
        if (step->sizes[way->first_size] * 2 > call->num_ranks) way->one_by_one += least * step->counts[i];
    }
    return 1;
}

static int64_t fewest_rows(const struct step *step, int64_t own) {
    return up(own, step->call->rank_tokens * step->call->num_ranks);
}

static int64_t bound_of(const struct step *step) {
    const struct way *way = &step->way;
    const int64_t least = way->least[step->num_lengths - 1];
    const int64_t even = most_of(most_of(up(way->total_work, step->call->num_ranks), way->one_by_one), least);
    const int64_t rows = fewest_rows(step, way->total_own);
    return most_of(even + (step->call->stages - 1) * least + step->call->per_microbatch * rows, 1);
}

/* The number of values that are at most `most`, of an ascending array. */
static int64_t at_most(const int64_t *values, int64_t n, int64_t most) {
    int64_t start = 0;
    while (n > 0) {
        const int64_t half = n / 2;
        if (values[start + half] <= most) start += half + 1, n -= half + 1;
        else n = half;
    }
    return start;
}

/* The longest length below `stop` of which a sample fits both; -1: none. */
static int64_t fitting(const struct step *step, int s, int64_t stop, int64_t load, int64_t room) {
    const int64_t found = at_most(step->load[s], stop, load);
    if (!found || step->padded[s][found - 1] <= room) return found - 1;
    return at_most(step->padded[s], found, room) - 1;
}

/* --- What waits. */

static void enter_waiting(struct step *step) {
    struct waiting *waiting = &step->waiting;
    memcpy(waiting->count, step->counts, (size_t)step->num_lengths * sizeof *waiting->count);
    for (int64_t i = 0; i < step->num_lengths; i++) waiting->below[i] = i - 1;
    waiting->work = step->way.total_work;
    waiting->own = step->way.total_own;
}

static void copy_waiting(const struct step *step, const struct waiting *from, struct waiting *to) {
    memcpy(to->count, from->count, (size_t)step->num_lengths * sizeof *to->count);
    memcpy(to->below, from->below, (size_t)step->num_lengths * sizeof *to->below);
    to->work = from->work;
    to->own = from->own;
}

static int64_t longest_waiting(struct waiting *waiting, int64_t most) {
    int64_t found = most;
    while (found >= 0 && !waiting->count[found]) found = waiting->below[found];
    while (most > found) {
        const int64_t next = waiting->below[most];
        waiting->below[most] = found;
        most = next;
    }
    return found;
}

static int64_t limit_of(const struct step *step, struct waiting *waiting, int64_t num_rows) {
    const int64_t longest = longest_waiting(waiting, step->num_lengths - 1);
    return most_of(step->way.least[longest], up(waiting->work, step->call->num_ranks * num_rows));
}

/* --- Bins. */

static void fill_bin(struct step *step, struct waiting *waiting, int64_t length, int64_t limit, int s) {
    struct bins *bins = &step->bins;
    const int64_t *load = step->load[s], *padded = step->padded[s];
    const int64_t space = step->call->rank_tokens * step->sizes[s];
    int64_t left = limit, room = space;
    while (length >= 0) {
        int64_t count = waiting->count[length]; /* mostly few, and all fit: a division takes as long as all the rest */
        if (count * padded[length] > room) count = room / padded[length];
        if (count * load[length] > left) count = left / load[length];
        waiting->count[length] -= count;
        waiting->work -= count * step->way.work[length];
        waiting->own -= count * step->way.own[length];
        bins->of_take[bins->num_takes] = bins->num_bins;
        bins->length[bins->num_takes] = length;
        bins->count[bins->num_takes++] = count;
        left -= count * load[length];
        room -= count * padded[length];
        length = longest_waiting(waiting, length);
        if (length >= 0 && (load[length] > left || padded[length] > room))
            length = longest_waiting(waiting, fitting(step, s, length, left, room));
    }
    bins->size[bins->num_bins] = step->sizes[s];
    bins->load[bins->num_bins] = limit - left;
    bins->tokens[bins->num_bins++] = space - room;
}

static void fill_row(struct step *step, struct waiting *waiting, int64_t limit, int64_t row) {
    int64_t longest[MOST_SIZES], ranks = step->call->num_ranks;
    for (int s = step->way.from; s < step->way.to; s++)
        longest[s] = fitting(step, s, step->num_lengths, limit, step->call->rank_tokens * step->sizes[s]);
    for (;;) {
        int64_t most = -1;
        for (int s = step->way.from; s < step->way.to && step->sizes[s] <= ranks; s++) most = most_of(most, longest[s]);
        const int64_t first = longest_waiting(waiting, most);
        if (first < 0) return;
        int s = step->way.from;
        while (longest[s] < first) s++;
        step->bins.row[step->bins.num_bins] = row;
        fill_bin(step, waiting, first, limit, s);
        ranks -= step->sizes[s];
    }
}

static int fill_last_row(struct step *step, int64_t row) {
    const int64_t start = limit_of(step, &step->waiting, 1);
    const int64_t num_bins = step->bins.num_bins, num_takes = step->bins.num_takes;
    for (int k = 0; k < NUM_ABOVE; k++) {
        copy_waiting(step, &step->waiting, &step->trial);
        fill_row(step, &step->trial, start + start / 64 * ABOVE[k] + start % 64 * ABOVE[k] / 64, row);
        if (longest_waiting(&step->trial, step->num_lengths - 1) < 0) return 1;
        step->bins.num_bins = num_bins;
        step->bins.num_takes = num_takes;
    }
    return 0;
}

/* Whether the microbatches so far and an even part of the work that is left cost no less than the best schedule. */
static int is_no_better(const struct step *step, int64_t loads, int64_t largest, int64_t num_rows) {
    const struct tm_contexts *call = step->call;
    const int64_t least = loads + up(step->waiting.work, call->num_ranks) + (call->stages - 1) * largest;
    return least + call->per_microbatch * num_rows >= step->best_cost;
}

/* Whether a schedule was made; none is where it would be no better. */
static int fill_rows(struct step *step, int64_t num_rows) {
    const int64_t multiple = step->call->microbatches_of;
    int64_t row = 0, loads = 0, largest = 0;
    step->bins.num_bins = step->bins.num_takes = 0;
    enter_waiting(step);
    while (longest_waiting(&step->waiting, step->num_lengths - 1) >= 0) {
        if (row == num_rows) num_rows += multiple;
        const int64_t rows_left = most_of(num_rows - row, fewest_rows(step, step->waiting.own));
        const int is_last = rows_left == 1 && fill_last_row(step, row);
        if (is_last) row++;
        if (is_last) break;
        const int64_t first = step->bins.num_bins;
        int64_t of_row = 0;
        fill_row(step, &step->waiting, limit_of(step, &step->waiting, most_of(rows_left, 2)), row++);
        for (int64_t i = first; i < step->bins.num_bins; i++) of_row = most_of(of_row, step->bins.load[i]);
        loads += of_row;
        largest = most_of(largest, of_row);
        if (is_no_better(step, loads, largest, row)) return 0;
    }
    step->num_rows = up(row, multiple) * multiple;
    return 1;
}

static int64_t cost_of(const struct tm_contexts *call, const int64_t *row, const int64_t *load, int64_t num_bins,
                       int64_t num_rows) {
    int64_t sum = 0, largest = 0, of_row = 0;
    for (int64_t i = 0; i < num_bins; i++) {
        if (i && row[i] != row[i - 1]) of_row = 0;
        if (load[i] > of_row) sum += load[i] - of_row, of_row = load[i];
        largest = most_of(largest, of_row);
    }
    return sum + (call->stages - 1) * largest + call->per_microbatch * num_rows;
}

static void search_way(struct step *step) {
    const int64_t multiple = step->call->microbatches_of;
    const int64_t fewest = up(fewest_rows(step, step->way.total_own), multiple);
    for (int64_t rows = fewest; rows < fewest + MORE_ROWS; rows++) {
        if (!fill_rows(step, rows * multiple)) continue;
        const struct bins made = step->bins;
        const int64_t cost = cost_of(step->call, made.row, made.load, made.num_bins, step->num_rows);
        if (cost >= step->best_cost) continue;
        step->bins = step->best;
        step->best = made;
        step->best_cost = cost;
        step->best_rows = step->num_rows;
        step->in_order_size = 0;
    }
}

/* --- Samples by number in runs of one size. */

/* What they cost, if it is less than `most`, or as much or more. */
static int64_t in_order_cost(const struct step *step, const int64_t *tokens, int64_t n, int s, int64_t most) {
    const struct tm_contexts *call = step->call;
    const struct run run = run_of(call, step->sizes[s]);
    const int64_t size = run.size, space = call->rank_tokens * size, width = call->num_ranks / size;
    int64_t sum = 0, largest = 0, load = 0, held = 0, of_row = 0, num_bins = 0;
    for (int64_t i = 0; i <= n; i++) {
        const int64_t padded = i < n ? padded_to(&run, tokens[i]) : space + 1;
        if (i && held + padded > space) {
            of_row = most_of(of_row, load);
            load = held = 0;
            if (++num_bins % width == 0 || i == n) sum += of_row, largest = most_of(largest, of_row), of_row = 0;
            if (sum >= most) return sum;
        }
        if (i == n) break;
        held += padded;
        load += load_of(call, &run, tokens[i], padded);
    }
    const int64_t rows = up(up(num_bins, width), call->microbatches_of) * call->microbatches_of;
    return sum + (call->stages - 1) * largest + call->per_microbatch * rows;
}

/* --- The call. */

static int check(struct tm_contexts *call) {
    const int64_t n = call->tokens.n, num_sizes = call->sizes.n, *tokens = call->tokens.at, *sizes = call->sizes.at;
    const int64_t small = 1 << 20, large = (int64_t)1 << 40;
    TM_CHECK_SIZE(call);
    TM_CHECK(call, n >= 1 && n < (int64_t)1 << 31, "no samples, or too many", n);
    TM_CHECK(call, call->bin_of_sample.n == n && call->row_of_bin.n == n && call->size_of_bin.n == n &&
             call->load_of_bin.n == n && call->tokens_of_bin.n == n, "not an entry per sample", n);
    TM_CHECK(call, num_sizes >= 1 && num_sizes <= MOST_SIZES, "no sizes, or too many", num_sizes);
    TM_CHECK(call, call->num_ranks >= 1 && call->num_ranks <= small, "ranks out of range", call->num_ranks);
    TM_CHECK(call, call->align >= 1 && call->align <= large, "align out of range", call->align);
    TM_CHECK(call, call->rank_tokens >= 1 && call->rank_tokens <= large, "rank_tokens out of range",
             call->rank_tokens);
    TM_CHECK(call, call->stages >= 1 && call->stages <= small, "stages out of range", call->stages);
    TM_CHECK(call, call->microbatches_of >= 1 && call->microbatches_of <= small, "microbatches_of out of range",
             call->microbatches_of);
    TM_CHECK(call, call->per_token >= 0 && call->per_pair >= 0 && call->per_exchanged >= 0 && call->per_microbatch >= 0,
             "a cost is negative", 0);
    TM_CHECK(call, call->per_microbatch <= MOST / (2 * n + 8 * call->microbatches_of), "costs exceed 62 bits", n);
    for (int64_t s = 0; s < num_sizes; s++)
        TM_CHECK(call, sizes[s] > (s ? sizes[s - 1] : 0) && sizes[s] <= call->num_ranks, "sizes do not ascend", s);
    const int64_t widest = sizes[num_sizes - 1];
    const struct run run = run_of(call, widest);
    for (int64_t i = 0; i < n; i++)
        TM_CHECK(call, tokens[i] >= 1 && tokens[i] <= large &&
                 padded_to(&run, tokens[i]) <= call->rank_tokens * widest, "a sample fits no run", i);
    return TM_DONE;
}

static void reserve_bins(struct arena *arena, struct bins *bins, int64_t n) {
    int64_t **const arrays[] = {&bins->row,     &bins->size,   &bins->load, &bins->tokens,
                                &bins->of_take, &bins->length, &bins->count};
    for (int k = 0; k < 7; k++) *arrays[k] = reserve(arena, n);
}

static void reserve_tables(struct arena *arena, struct step *step) {
    const int64_t count = step->num_lengths;
    for (int s = 0; s < step->num_sizes; s++) step->load[s] = reserve(arena, count), step->padded[s] = reserve(arena, count);
    int64_t **const arrays[] = {&step->way.work,      &step->way.least,   &step->way.own,    &step->waiting.count,
                                &step->waiting.below, &step->trial.count, &step->trial.below};
    for (int k = 0; k < 7; k++) *arrays[k] = reserve(arena, count);
}

static void write_bins(struct step *step, struct tm_contexts *call) {
    const struct bins *best = &step->best;
    const size_t bytes = (size_t)best->num_bins * sizeof(int64_t);
    int64_t *place = step->waiting.count, *bin_of_sample = call->bin_of_sample.at;
    memcpy(call->row_of_bin.at, best->row, bytes);
    memcpy(call->size_of_bin.at, best->size, bytes);
    memcpy(call->load_of_bin.at, best->load, bytes);
    memcpy(call->tokens_of_bin.at, best->tokens, bytes);
    for (int64_t i = 0, first = 0; i < step->num_lengths; first += step->counts[i++]) place[i] = first;
    for (int64_t k = 0; k < best->num_takes; k++)
        for (int64_t j = 0; j < best->count[k]; j++)
            bin_of_sample[step->by_length[place[best->length[k]]++]] = best->of_take[k];
    call->num_bins = best->num_bins;
    call->num_rows = step->best_rows;
    call->cost = step->best_cost;
}

static int solve(struct tm_contexts *call, struct arena *arena) {
    const int64_t n = call->tokens.n, *tokens = call->tokens.at;
    struct step step = {.call = call, .sizes = call->sizes.at, .num_sizes = (int)call->sizes.n, .best_cost = INT64_MAX};
    reserve_bins(arena, &step.bins, n);
    reserve_bins(arena, &step.best, n);
    step.by_length = reserve(arena, n);
    step.length = reserve(arena, n);
    step.counts = reserve(arena, n);
    TM_CHECK(call, !arena->has_failed, "no memory", n);
    int64_t longest = 0;
    for (int64_t i = 0; i < n; i++) longest = most_of(longest, tokens[i]);
    TM_CHECK(call, longest < (int64_t)1 << 32, "costs exceed 62 bits", longest); /* the square of it alone does */
    count_lengths(&step, sort_by_length(tokens, n, longest, step.by_length, step.bins.row, step.bins.size), n);
    reserve_tables(arena, &step);
    TM_CHECK(call, !arena->has_failed, "no memory", n);
    for (int s = 0; s < step.num_sizes; s++) TM_CHECK(call, fill_table(&step, s), "costs exceed 62 bits", s);
    TM_CHECK(call, fits_ranks(&step) && enter_way(&step, 0, step.num_sizes), "costs exceed 62 bits", n);
    const int first_size = step.way.first_size;
    call->lower_bound = bound_of(&step);
    call->in_order_cost = in_order_cost(&step, tokens, n, first_size, INT64_MAX);
    search_way(&step);
    for (int s = first_size; s < step.num_sizes; s++) {
        if (step.num_sizes > 1 && !enter_way(&step, s, s + 1)) continue;
        if (bound_of(&step) >= step.best_cost) continue;
        if (step.num_sizes > 1) search_way(&step);
        const int64_t cost =
            s == first_size ? call->in_order_cost : in_order_cost(&step, tokens, n, s, step.best_cost);
        if (cost < step.best_cost) step.best_cost = cost, step.in_order_size = step.sizes[s];
    }
    call->in_order_size = step.in_order_size;
    write_bins(&step, call);
    return TM_DONE;
}

TM_EXPORT int tm_contexts(struct tm_contexts *call) {
    struct arena arena = {.count = 0};
    int ended = check(call);
    if (ended == TM_DONE) ended = solve(call, &arena);
    release(&arena);
    return ended;
}
