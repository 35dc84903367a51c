/* Pieces -> samples of a step; planner/pack.py is the reference, mixture/keys.py that of hashes and sorted keys. */
#include "fold.h"

static const uint64_t PHI64 = 0x9E3779B97F4A7C15u;
static const int64_t MOST_END = (int64_t)1 << 60; /* of a piece in its document */
enum { MAX_CLASS = 3, SHORT = 48, FEW_SAMPLES = 64, LEVELS = 5 };

static uint64_t mix64(uint64_t value) {
    value ^= value >> 30;
    value *= 0xBF58476D1CE4E5B9u;
    value ^= value >> 27;
    value *= 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* Bits of a number from 0 on. */
static int bit_length(uint64_t value) {
    int bits = 0;
    for (; value; value >>= 1) bits++;
    return bits;
}

/* Bits that number `count` items. */
static int index_bits(int64_t count) { return count < 2 ? 1 : bit_length((uint64_t)count - 1); }

/* Sorts different keys; their bits below `low` ascend already. `spare` has as much memory as the keys. */
static void sort_keys(uint64_t *keys, uint64_t *spare, int64_t n, int low) {
    if (n <= SHORT) {
        for (int64_t i = 1; i < n; i++) {
            const uint64_t key = keys[i];
            int64_t j = i;
            for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
            keys[j] = key;
        }
        return;
    }
    const int bits = n < 4096 ? 8 : 11;
    uint64_t *from = keys, *to = spare;
    for (int shift = low; shift < 64; shift += bits) {
        int64_t count[1 << 11], place = 0;
        const uint64_t mask = ((uint64_t)1 << bits) - 1;
        memset(count, 0, (size_t)(mask + 1) * sizeof *count);
        for (int64_t i = 0; i < n; i++) count[from[i] >> shift & mask]++;
        if (count[from[0] >> shift & mask] == n) continue; /* all have the same digit */
        for (int64_t d = 0; d <= (int64_t)mask; d++) {
            const int64_t of_digit = count[d];
            count[d] = place;
            place += of_digit;
        }
        for (int64_t i = 0; i < n; i++) to[count[from[i] >> shift & mask]++] = from[i];
        uint64_t *swapped = from;
        from = to;
        to = swapped;
    }
    if (from != keys) memcpy(keys, from, (size_t)n * sizeof *keys);
}

/* The key by which `order_by` sorts: `major`, then as many bits of the hash as fit, then the position. */
static uint64_t key_of(uint64_t major, int major_bits, uint64_t tie, int64_t position, int of_index) {
    const int of_hash = 64 - major_bits - of_index;
    uint64_t key = (uint64_t)position;
    if (of_hash) key |= tie >> (64 - of_hash) << of_index;
    if (major_bits) key |= major << (64 - major_bits);
    return key;
}

static int64_t position_in(uint64_t key, int of_index) { return (int64_t)(key & (((uint64_t)1 << of_index) - 1)); }

/* What all ways of packing have: the pieces at hand, deferred ones first, and memory. */
struct packing {
    struct tm_step *step;
    struct tm_work work;
    struct tm_piece *pieces;
    uint64_t *name, *tie;
    int64_t n, num_deferred;
    int64_t num_placed, num_in_pool; /* so far, in all steps of the call */
    int64_t *of_piece;               /* [n] sample, or -1 */
};

static uint64_t name_of(const struct tm_fold *call, int64_t stream, int64_t source) {
    const int64_t *pair = call->pair.at, wanted = stream * call->num_sources + source;
    int64_t low = 0, high = call->pair.n;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (pair[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    const int is_pair = low < call->pair.n && pair[low] == wanted;
    return is_pair ? ((const uint64_t *)call->name_of_pair.at)[low]
                   : ((const uint64_t *)call->name_of_stream.at)[stream];
}

static uint64_t hash_of(uint64_t key, uint64_t name, const struct tm_piece *piece) {
    key = mix64(key * PHI64 + name);
    key = mix64(key * PHI64 + (uint64_t)piece->epoch);
    key = mix64(key * PHI64 + (uint64_t)piece->row);
    return mix64(key * PHI64 + (uint64_t)piece->start);
}

/* Writes one piece of a sample, the next of the step. */
static int place(struct packing *p, const struct tm_piece *piece, uint64_t name, int64_t sample, int64_t slot,
                 int64_t offset) {
    const struct tm_fold *call = p->step->call;
    const int64_t room = call->pieces.n / TM_PLACED_COLUMNS;
    if (p->num_placed == room) return TM_NEEDS_ROOM;
    int64_t *column = (int64_t *)call->pieces.at + p->num_placed;
    const int64_t *values = &piece->stream;
    for (int c = 0; c < TM_PIECE_COLUMNS; c++) column[c * room] = values[c];
    column[8 * room] = sample;
    column[9 * room] = slot;
    column[10 * room] = offset;
    const int64_t row[TM_DIGESTED] = {sample,     slot,         (int64_t)name, piece->epoch,
                                      piece->row, piece->start, piece->tokens};
    memcpy((int64_t *)call->digested.at + p->num_placed * TM_DIGESTED, row, sizeof row);
    p->num_placed++;
    return 0;
}

static int defer(struct packing *p, const struct tm_piece *piece) {
    const struct tm_fold *call = p->step->call;
    const int64_t room = call->pool.n / TM_PIECE_COLUMNS;
    if (p->num_in_pool == room) return TM_NEEDS_ROOM;
    int64_t *column = (int64_t *)call->pool.at + p->num_in_pool++;
    const int64_t *values = &piece->stream;
    for (int c = 0; c < TM_PIECE_COLUMNS; c++) column[c * room] = values[c];
    return 0;
}

/* Positions of [0, n) by a keyed hash: `keyed_order`, in `order`. */
static int keyed_order(uint64_t key, int64_t n, struct tm_work work, int64_t *order) {
    uint64_t *spare = tm_take_room(&work, n), *keys = (uint64_t *)order;
    if (spare == NULL) return TM_NEEDS_ROOM;
    const int of_index = index_bits(n);
    for (int64_t i = 0; i < n; i++) keys[i] = key_of(0, 0, mix64((uint64_t)i * PHI64 + key), i, of_index);
    sort_keys(keys, spare, n, of_index);
    for (int64_t i = 0; i < n; i++) order[i] = position_in(keys[i], of_index);
    return 0;
}

static uint64_t sample_key(const struct packing *p) {
    return ((const uint64_t *)p->step->call->sample_key.at)[p->step->number];
}

/* The stream of pieces, cut where samples end. */
static int concat(struct packing *p) {
    const struct tm_step *step = p->step;
    const int64_t n = p->n, length = step->call->length, num_new = n - p->num_deferred;
    int64_t *order = tm_take_room(&p->work, n), *begins = tm_take_room(&p->work, n + 1);
    int64_t *samples = tm_take_room(&p->work, step->num_samples), *first = tm_take_room(&p->work, step->num_samples);
    uint64_t *spare = tm_take_room(&p->work, n);
    if (!order || !begins || !samples || !first || !spare) return TM_NEEDS_ROOM;
    int failed = keyed_order(sample_key(p), step->num_samples, p->work, samples);
    if (failed) return failed;
    for (int64_t i = 0; i < p->num_deferred; i++) order[i] = i;
    uint64_t *keys = (uint64_t *)order + p->num_deferred;
    const int of_index = index_bits(num_new);
    for (int64_t i = 0; i < num_new; i++) keys[i] = key_of(0, 0, p->tie[p->num_deferred + i], i, of_index);
    sort_keys(keys, spare, num_new, of_index);
    for (int64_t i = 0; i < num_new; i++) order[p->num_deferred + i] = p->num_deferred + position_in(keys[i], of_index);
    begins[0] = 0;
    for (int64_t i = 0; i < n; i++) begins[i + 1] = begins[i] + p->pieces[order[i]].tokens;
    int64_t piece = 0;
    for (int64_t g = 0; g < step->num_samples; g++) { /* where each sample begins, in the order of the stream */
        while (piece < n && begins[piece + 1] <= g * length) piece++;
        first[g] = piece;
    }
    for (int64_t g = 0; g < step->num_samples && !failed; g++) { /* by their numbers */
        const int64_t start = samples[g] * length, stop = start + length;
        int64_t slot = 0;
        for (int64_t i = first[samples[g]]; i < n && begins[i] < stop && !failed; i++) {
            const int64_t begin = tm_max(begins[i], start), end = tm_min(begins[i + 1], stop);
            struct tm_piece part = p->pieces[order[i]];
            part.start += begin - begins[i];
            part.tokens = end - begin;
            failed = place(p, &part, p->name[order[i]], g, slot++, begin - start);
        }
    }
    for (int64_t i = 0; i < n && !failed; i++) {
        if (begins[i + 1] <= step->capacity) continue;
        struct tm_piece rest = p->pieces[order[i]];
        const int64_t given = tm_max(step->capacity - begins[i], 0);
        rest.start += given;
        rest.tokens -= given;
        failed = defer(p, &rest);
    }
    return failed;
}

/* A sample for each of some pieces, numbered by hash. */
static int one_each(struct packing *p, const int64_t *order, int64_t count) {
    int64_t *samples = tm_take_room(&p->work, p->step->num_samples);
    if (samples == NULL) return TM_NEEDS_ROOM;
    int failed = keyed_order(sample_key(p), p->step->num_samples, p->work, samples);
    for (int64_t g = 0, placed = 0; g < p->step->num_samples && !failed && placed < count; g++) {
        if (samples[g] >= count) continue;
        const int64_t i = order == NULL ? samples[g] : order[samples[g]];
        failed = place(p, p->pieces + i, p->name[i], g, 0, 0);
        placed++;
    }
    return failed;
}

/* Whether piece `a` goes before `b` where each has a sample of its own length: what was drawn first, then by hash. */
static int goes_first(const struct packing *p, int64_t a, int64_t b) {
    if (p->pieces[a].drawn_step != p->pieces[b].drawn_step) return p->pieces[a].drawn_step < p->pieces[b].drawn_step;
    if (p->tie[a] != p->tie[b]) return p->tie[a] < p->tie[b];
    return a < b;
}

static int64_t *merge_sorted(const struct packing *p, int64_t *order, int64_t *spare) {
    for (int64_t run = 1; run < p->n; run *= 2) {
        for (int64_t low = 0; low < p->n; low += 2 * run) {
            const int64_t middle = tm_min(low + run, p->n), high = tm_min(low + 2 * run, p->n);
            int64_t a = low, b = middle;
            for (int64_t i = low; i < high; i++) {
                const int is_first = a < middle && (b >= high || goes_first(p, order[a], order[b]));
                spare[i] = is_first ? order[a++] : order[b++];
            }
        }
        int64_t *sorted = spare;
        spare = order;
        order = sorted;
    }
    return order;
}

/* The shortest run of pieces that reaches the capacity; the rest waits. */
static int whole(struct packing *p) {
    int64_t *order = tm_take_room(&p->work, p->n), *spare = tm_take_room(&p->work, p->n);
    if (!order || !spare) return TM_NEEDS_ROOM;
    for (int64_t i = 0; i < p->n; i++) order[i] = i;
    order = merge_sorted(p, order, spare);
    int64_t count = 0;
    for (int64_t sum = 0; count < p->n && sum < p->step->capacity; count++) {
        sum += p->pieces[order[count]].tokens;
        p->of_piece[order[count]] = count;
    }
    p->step->num_samples = count;
    int failed = one_each(p, order, count);
    for (int64_t i = 0; i < p->n && !failed; i++)
        if (p->of_piece[i] < 0) failed = defer(p, p->pieces + i);
    return failed;
}

/* Samples in use by their room: for each room a heap of their numbers, and a tree of bits over the rooms. */
struct rooms {
    int64_t capacity, num_opened, num_samples;
    int64_t *room; /* [samples] left in each */
    int32_t *heap; /* [capacity + 1] first sample, from 1 on, of each room; 0: none. NULL where samples are few */
    int32_t *left, *right; /* [samples + 1] skew heaps: Sleator and Tarjan 1986 */
    uint64_t *bits[LEVELS];
    int num_levels;
};

static int rooms_of(struct rooms *rooms, struct tm_work *work, int64_t num_samples, int64_t capacity) {
    *rooms = (struct rooms){.capacity = capacity, .num_samples = num_samples};
    if ((rooms->room = tm_take_room(work, num_samples)) == NULL) return TM_NEEDS_ROOM;
    if (num_samples <= FEW_SAMPLES) return 0;
    rooms->heap = tm_take_room(work, capacity / 2 + 1);
    rooms->left = tm_take_room(work, num_samples / 2 + 1);
    rooms->right = tm_take_room(work, num_samples / 2 + 1);
    if (!rooms->heap || !rooms->left || !rooms->right) return TM_NEEDS_ROOM;
    memset(rooms->heap, 0, (size_t)(capacity + 1) * sizeof *rooms->heap);
    for (int64_t words = capacity + 1; rooms->num_levels == 0 || words > 1; rooms->num_levels++) {
        words = (words + 63) / 64;
        uint64_t *bits = tm_take_room(work, words);
        if (bits == NULL || rooms->num_levels == LEVELS) return TM_NEEDS_ROOM;
        memset(bits, 0, (size_t)words * sizeof *bits);
        rooms->bits[rooms->num_levels] = bits;
    }
    return 0;
}

static int lowest_bit(uint64_t word) { return __builtin_ctzll(word); }

/* The least room of `least` or more that some sample has; -1: none. */
static int64_t room_from(const struct rooms *rooms, int64_t least) {
    int64_t at = least;
    for (int level = 0; level < rooms->num_levels; level++) {
        const uint64_t word = rooms->bits[level][at >> 6] >> (at & 63);
        if (word) {
            at += lowest_bit(word);
            while (level-- > 0) at = at << 6 | lowest_bit(rooms->bits[level][at]);
            return at;
        }
        at = (at >> 6) + 1;
        if (level + 1 == rooms->num_levels || (at >> 6) >= ((rooms->capacity >> (6 * (level + 1))) >> 6) + 1) return -1;
    }
    return -1;
}

static void mark_room(struct rooms *rooms, int64_t room, int is_held) {
    for (int level = 0; level < rooms->num_levels; level++, room >>= 6) {
        uint64_t *word = rooms->bits[level] + (room >> 6);
        if (is_held)
            *word |= (uint64_t)1 << (room & 63);
        else if ((*word &= ~((uint64_t)1 << (room & 63))))
            return;
    }
}

static int32_t merged(struct rooms *rooms, int32_t a, int32_t b) {
    int32_t root = 0, *link = &root;
    while (a && b) {
        if (b < a) {
            const int32_t other = a;
            a = b;
            b = other;
        }
        *link = a;
        const int32_t rest = rooms->right[a];
        rooms->right[a] = rooms->left[a];
        link = &rooms->left[a];
        a = rest;
    }
    *link = a ? a : b;
    return root;
}

static void give_back(struct rooms *rooms, int64_t sample, int64_t room) {
    rooms->room[sample] = room;
    if (rooms->heap == NULL || room == 0) return;
    const int32_t number = (int32_t)sample + 1;
    rooms->left[number] = rooms->right[number] = 0;
    rooms->heap[room] = merged(rooms, rooms->heap[room], number);
    mark_room(rooms, room, 1);
}

/* Takes the sample in use with the least room that fits, of equal ones the first; else opens one; -1: none fits. */
static int64_t best_sample(struct rooms *rooms, int64_t units) {
    int64_t best = -1;
    if (rooms->heap == NULL) {
        for (int64_t g = 0; g < rooms->num_opened; g++)
            if (rooms->room[g] >= units && (best < 0 || rooms->room[g] < rooms->room[best])) best = g;
    } else {
        const int64_t room = room_from(rooms, units);
        if (room >= 0) {
            const int32_t number = rooms->heap[room];
            rooms->heap[room] = merged(rooms, rooms->left[number], rooms->right[number]);
            if (!rooms->heap[room]) mark_room(rooms, room, 0);
            best = number - 1;
        }
    }
    if (best < 0 && rooms->num_opened < rooms->num_samples) {
        best = rooms->num_opened++;
        rooms->room[best] = rooms->capacity;
    }
    return best;
}

/* Tokens at whose multiples a document is cut; 0: anywhere. */
static int64_t cut_of(const struct tm_fold *call, const struct tm_piece *piece) {
    return call->cuts.n ? ((const int64_t *)call->cuts.at)[piece->source] : call->length;
}

static int flows(const struct packing *p, const struct tm_piece *piece) { return !cut_of(p->step->call, piece); }

/* Marks the new whole pieces that are held back, the first by hash whose sum is at most the surplus: -2 in `of_piece`.
 */
static int hold_back(struct packing *p, const int64_t *units, int64_t surplus, uint64_t *keys, uint64_t *spare) {
    if (surplus <= 0) return 0;
    int64_t count = 0, *whole = tm_take_room(&p->work, p->n - p->num_deferred);
    if (whole == NULL) return TM_NEEDS_ROOM;
    for (int64_t i = p->num_deferred; i < p->n; i++)
        if (!flows(p, p->pieces + i)) whole[count++] = i;
    const int of_index = index_bits(count);
    for (int64_t i = 0; i < count; i++) keys[i] = key_of(0, 0, p->tie[whole[i]], i, of_index);
    sort_keys(keys, spare, count, of_index);
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = whole[position_in(keys[i], of_index)];
        if ((surplus -= units[at]) < 0) break;
        p->of_piece[at] = -2;
    }
    return 0;
}

/* The pieces that have a sample, by sample and by hash within. */
static int in_samples(struct packing *p, const int64_t *units, uint64_t *keys, uint64_t *spare, int64_t *starts) {
    const int64_t G = p->step->num_samples, align = p->step->call->align_tokens;
    int64_t placed = 0;
    memset(starts, 0, (size_t)(G + 1) * sizeof *starts);
    for (int64_t i = 0; i < p->n; i++)
        if (p->of_piece[i] >= 0) {
            starts[p->of_piece[i] + 1]++;
            placed++;
        }
    for (int64_t g = 0; g < G; g++) starts[g + 1] += starts[g];
    const int of_sample = index_bits(G), of_index = index_bits(placed);
    int64_t *piece_at = (int64_t *)spare; /* positions count placed pieces alone */
    for (int64_t i = 0, position = 0; i < p->n; i++) {
        if (p->of_piece[i] < 0) continue;
        const uint64_t tie = of_sample + of_index < 64 ? p->tie[i] >> (of_sample + of_index) : 0;
        keys[starts[p->of_piece[i]]++] = tie << of_index | (uint64_t)position;
        piece_at[position++] = i;
    }
    int failed = 0;
    uint64_t *more = tm_take_room(&p->work, placed);
    if (more == NULL) return TM_NEEDS_ROOM;
    for (int64_t g = 0, first = 0; g < G && !failed; first = starts[g++]) {
        sort_keys(keys + first, more, starts[g] - first, of_index);
        int64_t offset = 0;
        for (int64_t i = first; i < starts[g] && !failed; i++) {
            const int64_t at = piece_at[position_in(keys[i], of_index)];
            failed = place(p, p->pieces + at, p->name[at], g, i - first, offset);
            offset += units[at] * align;
        }
    }
    return failed;
}

/* Best-fit decreasing by age class, of all pieces but those that may be cut. */
static int fit(struct packing *p, const int64_t *units, uint64_t *keys, uint64_t *spare) {
    const struct tm_step *step = p->step;
    const int64_t n = p->n, G = step->num_samples, capacity = step->call->length / step->call->align_tokens;
    int64_t *samples = tm_take_room(&p->work, G), *number = tm_take_room(&p->work, G);
    struct rooms rooms;
    if (!samples || !number) return TM_NEEDS_ROOM;
    int failed = keyed_order(sample_key(p), G, p->work, samples);
    if (!failed) failed = rooms_of(&rooms, &p->work, G, capacity);
    if (failed) return failed;
    for (int64_t g = 0; g < G; g++) number[samples[g]] = g;
    int64_t surplus = -G * capacity, num_ready = 0;
    for (int64_t i = 0; i < n; i++)
        if (!flows(p, p->pieces + i)) {
            TM_CHECK(step->call, units[i] >= 1 && units[i] <= capacity, "a piece is longer than a sample", i);
            surplus += units[i];
        }
    failed = hold_back(p, units, surplus, keys, spare);
    if (failed) return failed;
    const int of_unit = bit_length((uint64_t)capacity);
    int64_t *ready = tm_take_room(&p->work, n);
    if (ready == NULL) return TM_NEEDS_ROOM;
    for (int64_t i = 0; i < n; i++)
        if (p->of_piece[i] == -1 && !flows(p, p->pieces + i)) ready[num_ready++] = i;
    const int of_index = index_bits(num_ready);
    if (2 + of_unit + of_index > 64) return TM_BY_REFERENCE;
    for (int64_t i = 0; i < num_ready; i++) { /* the class that waits longest first; in a class the longest */
        const int64_t age = step->step - p->pieces[ready[i]].drawn_step;
        TM_CHECK(step->call, age >= 0, "a piece was drawn in a later step", ready[i]);
        const uint64_t age_class = (uint64_t)(MAX_CLASS - tm_min(age, MAX_CLASS));
        const uint64_t major = age_class << of_unit | (uint64_t)(capacity - units[ready[i]]);
        keys[i] = key_of(major, 2 + of_unit, p->tie[ready[i]], i, of_index);
    }
    sort_keys(keys, spare, num_ready, of_index);
    for (int64_t i = 0; i < num_ready; i++) {
        const int64_t at = ready[position_in(keys[i], of_index)], best = best_sample(&rooms, units[at]);
        if (best < 0) continue;
        p->of_piece[at] = number[best];
        give_back(&rooms, best, rooms.room[best] - units[at]);
    }
    return 0;
}

/* Adds a new piece to the deferred one that it goes on from, if there is one of `count`. */
static int goes_on(struct packing *p, const int64_t *waiting, int64_t count, const struct tm_piece *piece) {
    if (piece->start == 0) return 0;
    for (int64_t i = 0; i < count; i++) {
        struct tm_piece *before = p->pieces + waiting[i];
        if (before->row != piece->row || before->start + before->tokens != piece->start) continue;
        if (before->stream != piece->stream || before->source != piece->source || before->epoch != piece->epoch) continue;
        before->tokens += piece->tokens;
        return 1;
    }
    return 0;
}

/* Numbers of the pieces that may be cut: deferred ones in order, with what goes on from them, then new ones by hash. */
static int64_t stream_of(struct packing *p, int64_t *stream, uint64_t *keys, uint64_t *spare) {
    int64_t count = 0, num_new = 0;
    for (int64_t i = 0; i < p->num_deferred; i++)
        if (flows(p, p->pieces + i)) stream[count++] = i;
    int64_t *new = stream + count;
    for (int64_t i = p->num_deferred; i < p->n; i++)
        if (flows(p, p->pieces + i) && !goes_on(p, stream, count, p->pieces + i)) new[num_new++] = i;
    const int of_index = index_bits(num_new);
    for (int64_t i = 0; i < num_new; i++) keys[i] = key_of(0, 0, p->tie[new[i]], i, of_index);
    sort_keys(keys, spare, num_new, of_index);
    for (int64_t i = 0; i < num_new; i++) keys[i] = (uint64_t)new[position_in(keys[i], of_index)];
    memcpy(new, keys, (size_t)num_new * sizeof *new);
    return count + num_new;
}

/* Pieces that may be cut flow into what whole ones leave: the pieces are the whole ones and the parts then. */
static int flow(struct packing *p, int64_t **units, uint64_t *keys, uint64_t *spare) {
    const struct tm_step *step = p->step;
    const int64_t n = p->n, G = step->num_samples, align = step->call->align_tokens;
    int64_t *stream = tm_take_room(&p->work, n), *room = tm_take_room(&p->work, G), most = n + G, placed = 0;
    struct packing all = *p;
    all.pieces = tm_take_room(&p->work, most * TM_PIECE_COLUMNS);
    all.name = tm_take_room(&p->work, most);
    all.tie = tm_take_room(&p->work, most);
    all.of_piece = tm_take_room(&p->work, most);
    int64_t *units_of = tm_take_room(&p->work, most);
    if (!stream || !room || !all.pieces || !all.name || !all.tie || !all.of_piece || !units_of) return TM_NEEDS_ROOM;
    for (int64_t g = 0; g < G; g++) room[g] = step->call->length / align;
    for (int64_t i = 0; i < n; i++) {
        if (flows(p, p->pieces + i)) continue;
        if (p->of_piece[i] < 0) {
            const int failed = defer(p, p->pieces + i);
            if (failed) return failed;
            continue;
        }
        all.pieces[placed] = p->pieces[i];
        all.name[placed] = p->name[i];
        all.tie[placed] = p->tie[i];
        all.of_piece[placed] = p->of_piece[i];
        units_of[placed++] = (*units)[i];
        room[p->of_piece[i]] -= (*units)[i];
    }
    const int64_t count = stream_of(p, stream, keys, spare);
    const uint64_t key = ((const uint64_t *)step->call->pack_key.at)[step->number];
    for (int64_t i = 0, g = 0; i < count; i++) {
        struct tm_piece rest = p->pieces[stream[i]];
        for (; rest.tokens > 0; g += room[g] == 0) {
            while (g < G && room[g] == 0) g++;
            if (g == G) break;
            struct tm_piece *part = all.pieces + placed;
            *part = rest;
            units_of[placed] = tm_min(room[g], (rest.tokens + align - 1) / align);
            part->tokens = tm_min(rest.tokens, units_of[placed] * align);
            all.name[placed] = p->name[stream[i]];
            all.tie[placed] = hash_of(key, all.name[placed], part);
            all.of_piece[placed] = g;
            room[g] -= units_of[placed++];
            rest.start += part->tokens;
            rest.tokens -= part->tokens;
        }
        if (rest.tokens == 0) continue;
        const int failed = defer(p, &rest);
        if (failed) return failed;
    }
    all.n = placed;
    all.work = p->work;
    all.num_in_pool = p->num_in_pool;
    *p = all;
    *units = units_of;
    return 0;
}

/* Whole pieces by best fit, and then those that may be cut. */
static int best_fit(struct packing *p) {
    const struct tm_step *step = p->step;
    const int64_t n = p->n, most = n + (step->call->cuts.n ? step->num_samples : 0), align = step->call->align_tokens;
    int64_t *units = tm_take_room(&p->work, n), *starts = tm_take_room(&p->work, step->num_samples + 1);
    uint64_t *keys = tm_take_room(&p->work, most), *spare = tm_take_room(&p->work, most);
    if (!units || !starts || !keys || !spare) return TM_NEEDS_ROOM;
    for (int64_t i = 0; i < n; i++) units[i] = (p->pieces[i].tokens + align - 1) / align;
    int failed = fit(p, units, keys, spare);
    if (failed) return failed;
    if (step->call->cuts.n) {
        failed = flow(p, &units, keys, spare);
        return failed ? failed : in_samples(p, units, keys, spare, starts);
    }
    failed = in_samples(p, units, keys, spare, starts);
    for (int64_t i = 0; i < n && !failed; i++)
        if (p->of_piece[i] < 0) failed = defer(p, p->pieces + i);
    return failed;
}

/* Deferred pieces and those drawn, before they are cut. */
struct uncut {
    const int64_t *column; /* of the first deferred one */
    const struct tm_piece *drawn;
    int64_t room, in_pool, n;
};

static struct tm_piece uncut_piece(const struct uncut *all, int64_t i) {
    if (i >= all->in_pool) return all->drawn[i - all->in_pool];
    struct tm_piece piece;
    for (int c = 0; c < TM_PIECE_COLUMNS; c++) (&piece.stream)[c] = all->column[c * all->room + i];
    return piece;
}

/* Deferred pieces, then those drawn, cut at multiples of `cuts` of their documents; `concat` cuts them itself. A deferred
 * piece is longer than a sample where the samples of the step before were. */
static int pieces_at_hand(struct packing *p, const struct tm_piece *drawn, int64_t num_drawn) {
    const struct tm_step *step = p->step;
    const struct tm_fold *call = step->call;
    const int64_t *marks = (const int64_t *)call->marks.at + step->number * TM_MARKS;
    const int64_t first = step->number && call->method != TM_PAD ? marks[TM_POOL_END - TM_MARKS] : 0;
    const int64_t in_pool = call->method == TM_PAD ? 0 : marks[TM_POOL_END] - first;
    const struct uncut all = {.column = (const int64_t *)call->pool.at + first,
                              .drawn = drawn,
                              .room = call->pool.n / TM_PIECE_COLUMNS,
                              .in_pool = in_pool,
                              .n = in_pool + num_drawn};
    const int checks_source = call->cuts.n > 0;
    for (int64_t i = 0; i < all.n; i++) {
        const struct tm_piece piece = uncut_piece(&all, i);
        TM_CHECK(step->call, !checks_source || tm_is_within(piece.source, 1, call->num_sources),
                 "a piece is of no source", i);
        TM_CHECK(step->call, piece.tokens > 0 && tm_is_within(piece.start, piece.tokens, MOST_END),
                 "a piece has no tokens", i);
        const int64_t cut = call->method == TM_CONCAT ? 0 : cut_of(call, &piece);
        p->n += cut ? (piece.start + piece.tokens + cut - 1) / cut - piece.start / cut : 1;
        if (i < in_pool) p->num_deferred = p->n;
    }
    p->pieces = tm_take_room(&p->work, p->n * TM_PIECE_COLUMNS);
    p->name = tm_take_room(&p->work, p->n);
    p->tie = tm_take_room(&p->work, p->n);
    p->of_piece = tm_take_room(&p->work, p->n);
    if (!p->pieces || !p->name || !p->tie || !p->of_piece) return TM_NEEDS_ROOM;
    int64_t n = 0;
    for (int64_t i = 0; i < all.n; i++) {
        const struct tm_piece piece = uncut_piece(&all, i);
        const int64_t stop = piece.start + piece.tokens;
        const int64_t cut = call->method == TM_CONCAT ? 0 : cut_of(call, &piece);
        for (int64_t start = piece.start; start < stop;) {
            const int64_t end = cut ? tm_min(stop, (start / cut + 1) * cut) : stop;
            p->pieces[n] = piece;
            p->pieces[n].start = start;
            p->pieces[n++].tokens = end - start;
            start = end;
        }
    }
    const uint64_t key = ((const uint64_t *)call->pack_key.at)[step->number];
    for (int64_t i = 0; i < p->n; i++) {
        const struct tm_piece *piece = p->pieces + i;
        TM_CHECK(step->call, piece->stream >= 0 && piece->stream < call->num_streams, "a piece is of no stream", i);
        p->name[i] = name_of(call, piece->stream, piece->source);
        p->tie[i] = hash_of(key, p->name[i], piece);
        p->of_piece[i] = -1;
    }
    return 0;
}

int tm_pack_step(struct tm_step *step, struct tm_work work, const struct tm_piece *drawn, int64_t num_drawn) {
    const int64_t *marks = (const int64_t *)step->call->marks.at + step->number * TM_MARKS;
    struct packing p = {
        .step = step, .work = work, .num_placed = marks[TM_PIECES_END], .num_in_pool = marks[TM_POOL_END]};
    int ended = pieces_at_hand(&p, drawn, num_drawn);
    if (ended) return ended;
    switch (step->call->method) {
        case TM_CONCAT: ended = concat(&p); break;
        case TM_BEST_FIT: ended = best_fit(&p); break;
        case TM_WHOLE: ended = whole(&p); break;
        default: ended = p.n > step->num_samples ? TM_BY_REFERENCE : one_each(&p, NULL, p.n);
    }
    if (ended) return ended;
    int64_t *after = (int64_t *)step->call->marks.at + (step->number + 1) * TM_MARKS;
    after[TM_PIECES_END] = p.num_placed;
    after[TM_POOL_END] = p.num_in_pool;
    after[TM_SAMPLES] = step->num_samples;
    return 0;
}
