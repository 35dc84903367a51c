/* Samples -> (rank, microbatch), and items -> bins below a limit; planner/balance.py, planner/graph/samples.py and
   planner/methods.py are the reference. */
#include "native.h"

enum { BY_HASH = 0, ROWS = 1 };                                /* methods */
enum { SUM_OF_ROWS = 0, MOST = 1, OF_RANK = 2, PIPELINE = 3 }; /* objectives */
enum { UNIMODAL = 0, DESCENDING = 1 };                         /* orders of microbatches; any other keeps the rows */
enum { MOST_BATCH = 1 << 30 };

struct tm_place {
    struct tm_head head;
    struct tm_array tokens;   /* int64 [n] of pieces */
    struct tm_array sample;   /* int64 [n] of each, ascending */
    struct tm_array placed;   /* int64 [3, G] written: rank, microbatch and slot of each sample */
    struct tm_array digested; /* int64 [G, 3] written: the same by sample */
    struct tm_array work;     /* int64 [14 G] */
    int64_t per_token;
    int64_t per_pair;
    int64_t whole_sample; /* whether attention spans the whole sample */
    int64_t length;
    int64_t dp;
    int64_t micro_batch_size;
    int64_t stages;
    int64_t method;
    int64_t objective;
    int64_t microbatches;
    int64_t cost;            /* written: of the placement */
    int64_t hash_order_cost; /* written */
    int64_t lower_bound;     /* written */
    int64_t took_hash_order; /* written: whether the method's placement was dearer */
};

/* What is sorted: by `first`, then `second`; equal ones stay in their order. */
struct item {
    int64_t first, second, index;
};

/* Sorts by merging; the result lies in one of the two, and is returned. */
static struct item *sorted(struct item *items, struct item *spare, int64_t n) {
    for (int64_t run = 1; run < n; run *= 2) {
        for (int64_t low = 0; low < n; low += 2 * run) {
            const int64_t middle = low + run < n ? low + run : n, high = low + 2 * run < n ? low + 2 * run : n;
            int64_t a = low, b = middle;
            for (int64_t i = low; i < high; i++) {
                const int is_behind = b < high && a < middle &&
                                      (items[b].first < items[a].first ||
                                       (items[b].first == items[a].first && items[b].second < items[a].second));
                spare[i] = a >= middle || is_behind ? items[b++] : items[a++];
            }
        }
        struct item *swapped = items;
        items = spare;
        spare = swapped;
    }
    return items;
}

static void costs_of(const struct tm_place *call, int64_t *cost, int64_t G) {
    const int64_t *tokens = call->tokens.at, *sample = call->sample.at;
    const int64_t of_padding = call->per_token * call->length;
    for (int64_t g = 0; g < G; g++)
        cost[g] = of_padding + (call->whole_sample ? call->per_pair * call->length * call->length : 0);
    if (call->whole_sample) return;
    for (int64_t i = 0; i < call->tokens.n; i++) cost[sample[i]] += call->per_pair * tokens[i] * tokens[i];
}

/* What a placement costs; `bins` is memory [G], and is left with the cost of each rank's microbatches. */
static int64_t judged(const struct tm_place *call, const int64_t *cost, const int64_t *rank, const int64_t *row,
                      int64_t G, int64_t *bins) {
    const int64_t dp = call->dp, rows = G / (dp * call->micro_batch_size);
    memset(bins, 0, (size_t)(dp * rows) * sizeof *bins);
    for (int64_t g = 0; g < G; g++) bins[rank[g] * rows + row[g]] += cost[g];
    int64_t sum = 0, most = 0, of_rank = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t slowest = 0;
        for (int64_t d = 0; d < dp; d++)
            if (bins[d * rows + r] > slowest) slowest = bins[d * rows + r];
        sum += slowest;
        if (slowest > most) most = slowest;
    }
    for (int64_t d = 0; d < dp; d++) {
        int64_t all = 0;
        for (int64_t r = 0; r < rows; r++) all += bins[d * rows + r];
        if (all > of_rank) of_rank = all;
    }
    switch (call->objective) {
        case MOST: return most;
        case OF_RANK: return of_rank;
        case PIPELINE: return sum + (call->stages - 1) * most;
        default: return sum;
    }
}

/* Samples by cost, dealt to the ranks in blocks of like cost: the costliest to the rank with the least so far. */
static void in_rows(const struct tm_place *call, const int64_t *cost, int64_t *rank, int64_t *row, int64_t G,
                    struct item *items) {
    const int64_t dp = call->dp, row_samples = dp * call->micro_batch_size, rows = G / row_samples;
    for (int64_t g = 0; g < G; g++) items[g] = (struct item){-cost[g], 0, g};
    struct item *by_cost = sorted(items, items + G, G);
    struct item *load = by_cost == items ? items + G : items; /* [dp] cost in this microbatch, cost in the step, rank */
    struct item *spare = items + 2 * G;
    for (int64_t d = 0; d < dp; d++) load[d] = (struct item){0, 0, d};
    for (int64_t start = 0; start < G; start += dp) {
        struct item *least;
        if (start % row_samples == 0)
            for (int64_t d = 0; d < dp; d++) load[d].first = 0;
        memcpy(spare, load, (size_t)dp * sizeof *load);
        least = sorted(spare, spare + dp, dp); /* `load` is by rank, so equal ones go by rank */
        const int64_t r = start / row_samples, half = rows / 2;
        for (int64_t i = 0; i < dp; i++) {
            const struct item *sample = by_cost + start + i;
            struct item *of_rank = load + least[i].index;
            rank[sample->index] = of_rank->index;
            /* Unimodal: the costliest row is in the middle, and the others by turns before and behind it. */
            row[sample->index] = call->microbatches != UNIMODAL ? r : r % 2 ? half - 1 - r / 2 : half + r / 2;
            of_rank->first -= sample->first;
            of_rank->second -= sample->first;
        }
    }
}

static int check(struct tm_place *call) {
    TM_CHECK_SIZE(call);
    const int64_t G = call->placed.n / 3, n = call->tokens.n;
    TM_CHECK(call, G >= 1 && call->placed.n == 3 * G && call->digested.n == 3 * G && call->work.n >= 14 * G,
             "not a place per sample", G);
    TM_CHECK(call, call->length >= 1 && G <= MOST_BATCH && call->length <= MOST_BATCH / G, "a batch out of bounds",
             call->length);
    TM_CHECK(call, call->dp >= 1 && call->micro_batch_size >= 1 && call->dp <= G && call->micro_batch_size <= G,
             "no ranks", call->dp);
    TM_CHECK(call, G % (call->dp * call->micro_batch_size) == 0, "samples that no layout holds", G);
    TM_CHECK(call, call->per_token >= 0 && call->per_pair >= 0 && call->stages >= 1, "costs below 0", call->per_token);
    TM_CHECK(call, call->sample.n == n, "not a sample per piece", n);
    const int64_t *sample = call->sample.at;
    for (int64_t i = 0; i < n; i++) TM_CHECK(call, sample[i] >= 0 && sample[i] < G, "a piece lies in no sample", i);
    return TM_DONE;
}

TM_EXPORT int tm_place(struct tm_place *call) {
    const int refused = check(call);
    if (refused) return refused;
    const int64_t G = call->placed.n / 3, dp = call->dp, size = call->micro_batch_size, rows = G / (dp * size);
    int64_t *rank = call->placed.at, *row = rank + G, *slot = row + G, *cost = call->work.at, *bins = cost + G;
    struct item *items = (struct item *)(bins + G); /* 4 G of them */
    costs_of(call, cost, G);
    int64_t total = 0, largest = 0;
    for (int64_t g = 0; g < G; g++) {
        total += cost[g];
        if (cost[g] > largest) largest = cost[g];
        rank[g] = g / size % dp;
        row[g] = g / (size * dp);
    }
    call->cost = call->hash_order_cost = judged(call, cost, rank, row, G, bins);
    call->took_hash_order = 0;
    if (call->method == ROWS) {
        in_rows(call, cost, rank, row, G, items);
        call->cost = judged(call, cost, rank, row, G, bins);
        call->took_hash_order = call->cost > call->hash_order_cost;
    }
    if (call->took_hash_order) {
        call->cost = call->hash_order_cost;
        for (int64_t g = 0; g < G; g++) {
            rank[g] = g / size % dp;
            row[g] = g / (size * dp);
        }
    }
    const int64_t of_bin = total / (dp * rows) + (total % (dp * rows) != 0), of_rank = total / dp + (total % dp != 0);
    const int64_t in_bin = of_bin > largest ? of_bin : largest, in_step = of_rank > largest ? of_rank : largest;
    const int64_t bound =
        call->objective == MOST ? in_bin : in_step + (call->objective == PIPELINE ? (call->stages - 1) * in_bin : 0);
    call->lower_bound = bound > 1 ? bound : 1;
    memset(bins, 0, (size_t)(dp * rows) * sizeof *bins);
    int64_t *digested = call->digested.at;
    for (int64_t g = 0; g < G; g++) {
        slot[g] = bins[rank[g] * rows + row[g]]++;
        digested[3 * g] = rank[g];
        digested[3 * g + 1] = row[g];
        digested[3 * g + 2] = slot[g];
    }
    return TM_DONE;
}

/* Items one after the other, each to a bin that it leaves within the limit; `fitted` of planner/methods.py. */
struct tm_fit {
    struct tm_head head;
    struct tm_array cost;  /* int64 [n] of the items in the order in which they are placed */
    struct tm_array home;  /* int64 [n] of each, or none */
    struct tm_array bin;   /* int64 [n] written: of each */
    struct tm_array least; /* int64 [2 * size] work: the least load below each node of a tree; the leaves are the bins */
    int64_t num_bins;
    int64_t num_homes; /* each has as many bins, one behind the other */
    int64_t limit;
    int64_t takes_first; /* away from home: the first bin with room, else the one with the least load */
    int64_t num_placed;  /* written: n, or fewer where an item has no room */
};

enum { MOST_BINS = 1 << 24 };

TM_EXPORT int tm_fit(struct tm_fit *call) {
    TM_CHECK_SIZE(call);
    const int64_t n = call->cost.n, num_bins = call->num_bins, limit = call->limit;
    const int64_t *cost = call->cost.at, *home = call->home.n ? call->home.at : 0;
    int64_t *bin = call->bin.at, *least = call->least.at, size = 1;
    TM_CHECK(call, call->bin.n == n && (!home || call->home.n == n), "not a place per item", n);
    TM_CHECK(call, num_bins >= 1 && num_bins <= MOST_BINS && call->num_homes >= 1 && num_bins % call->num_homes == 0,
             "homes do not divide the bins", num_bins);
    while (size < num_bins) size *= 2;
    TM_CHECK(call, call->least.n == 2 * size, "not a node per bin", call->least.n);
    TM_CHECK(call, limit >= 0 && limit < INT64_MAX, "a limit out of bounds", limit);
    for (int64_t i = 0; i < size; i++) least[size + i] = i < num_bins ? 0 : INT64_MAX;
    for (int64_t node = size - 1; node >= 1; node--) least[node] = least[2 * node]; /* the left one is never above */
    const int64_t width = num_bins / call->num_homes;
    call->num_placed = 0;
    for (int64_t i = 0; i < n; i++) {
        TM_CHECK(call, cost[i] >= 0, "a cost below 0", i);
        const int64_t most = limit - cost[i]; /* load that leaves room for it */
        int64_t node = 0;
        if (home) {
            TM_CHECK(call, home[i] >= 0 && home[i] < call->num_homes, "no such home", i);
            node = size + home[i] * width;
            for (int64_t other = node + 1; other < size + (home[i] + 1) * width; other++)
                if (least[other] < least[node]) node = other;
            if (least[node] > most) node = 0;
        }
        if (!node) {
            if (least[1] > most) return TM_DONE;
            for (node = 1; node < size;) {
                node *= 2;
                node += call->takes_first ? least[node] > most : least[node + 1] < least[node];
            }
        }
        bin[i] = node - size;
        least[node] += cost[i];
        while (node > 1) {
            node /= 2;
            const int64_t lower = least[2 * node] <= least[2 * node + 1] ? least[2 * node] : least[2 * node + 1];
            if (least[node] == lower) break;
            least[node] = lower;
        }
        call->num_placed = i + 1;
    }
    return TM_DONE;
}
