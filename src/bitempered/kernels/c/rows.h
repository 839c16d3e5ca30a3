/* A block of rows: what is asked of it, its state, and its gaps u = max(a) - a.

   A block is LANES rows side by side if there are few classes, or one row folded into LANES columns. Vectors run over
   it either way, and it is read from memory once: later passes find it in the cache. Numbers per row are float64, and
   sums are carried over to float64 every CHUNK vectors.

   The largest logit, the top, is left out of the float32 sums: its r is 1, and its gradient is computed in float64. So
   the small gradients of confident rows, right or wrong, have a relative error of 1e-5. */

#define FOLDED_FROM 512  /* classes, if they are adjacent in memory, */
#define STRIDED_FROM 8192 /* or if they are not */
#define CHUNK 32
#define GRAIN 4096 /* a thread takes blocks of at least this many logits at once */

typedef struct {
    View logits;
    int64_t n, inner, k; /* rows, the size of View.inner, classes */
    double t1, t2, s;    /* s = t2 - 1 */
    double stretch;      /* multiplies the gaps */
} Problem;

typedef struct { /* the state of a block, by lane; in a folded row all lanes hold the same */
    Place at;
    int in_float64;
    vf *u, *low;     /* the block: gaps, and what rounding took from them */
    vd *gap;         /* the same in float64, if it is needed */
    vf *e, *v;       /* the results of the last pass, */
    vd *e_64, *v_64; /* or in float64, in the same memory */
    int64_t top[LANES];
    vl bad[2];               /* rows with NaN, +inf, or nothing but -inf */
    Lanes max, count, m;     /* count: classes that are not masked */
    Lanes decay, p, r;       /* e^(-s m), y_hat of the top, sum of r without the top */
} Rows;

enum { SIZE_OF_ROWS = 8 }; /* in vf per vector of a block */
static void use_memory(Rows *rows, vf *memory) {
    int64_t length = rows->at.length;
    rows->u = memory, rows->low = memory + length, rows->gap = (vd *)(memory + 2 * length);
    rows->e = memory + 4 * length, rows->v = memory + 6 * length;
    rows->e_64 = (vd *)rows->e, rows->v_64 = (vd *)rows->v;
}

static int is_folded(const Problem *of) { return of->k >= (of->logits.class == 1 ? FOLDED_FROM : STRIDED_FROM); }
static int64_t block_length(const Problem *of) { return is_folded(of) ? (of->k + LANES - 1) / LANES : of->k; }

/* How many rows a thread takes at once. */
static int64_t grain_of(const Problem *of) {
    int64_t at_once = is_folded(of) ? 1 : LANES;
    return at_once * (1 + GRAIN / (block_length(of) * LANES));
}

static void go_to(const Problem *of, Place *at, int64_t first) {
    int64_t outer = first / of->inner, inner = first % of->inner;
    at->used = at->folded ? 1 : (int)least(LANES, of->n - first);
    EACH(l) {
        at->outer[l] = outer, at->inner[l] = inner;
        if (l + 1 < at->used && ++inner == of->inner) outer++, inner = 0;
    }
}

INLINE void finish(const Rows *rows, vd *sums, double top) {
    double sum = 0;
    EACH(l) sum += lanes(sums)[l];
    HALVES(h) sums[h] = (rows->at.folded ? all64(sum) : sums[h]) + top;
}
INLINE int is_64(const Problem *of) { return of->logits.dtype == FLOAT64; }
/* Gaps are multiplied, not logits: the product would round what all logits of a row have in common. */
INLINE double stretch_of(const Problem *of) { return is_64(of) ? of->stretch : (float)of->stretch; }

/* The largest number per lane; in a folded row, of all lanes. */
INLINE double most_of(const double *values) {
    double most = values[0];
    EACH(l) most = values[l] > most ? values[l] : most;
    return most;
}

/* From float32 to `u`, in which NaN marks the columns to leave out: masked classes, those beyond the last class, and
   the top. Returns the sum of the gaps. */
static void load_32(const Problem *of, Rows *rows, vd *sum) {
    vf *u = rows->u, max = all(-INFINITY);
    float limit = 0x1p126f / (of->s > 1 ? (float)of->s : 1), stretch = (float)stretch_of(of); /* s u must be finite */
    int64_t length = rows->at.length;
    int folded = rows->at.folded;
    fetch(&of->logits, &rows->at, u, -INFINITY);
    vi nan = {0}, top = {0}, here = {0};
    for (int64_t j = 0; j < length; j++) {
        max = pick(u[j] > max, u[j], max);
        nan |= u[j] != u[j];
    }
    if (folded) {
        float most = -INFINITY;
        int any = 0;
        EACH(l) most = max[l] > most ? max[l] : most, any |= nan[l], here[l] = l;
        max = all(most), nan = (vi){0} + any;
    }
    for (int64_t start = 0; start < length; start += CHUNK) {
        vf part = {0};
        vi kept = {0};
        for (int64_t j = start; j < least(start + CHUNK, length); j++) {
            vf gap = max - u[j];
            vi finite = gap < INFINITY, zero = gap == 0;
            top = (zero & here) | (~zero & top);
            here += folded ? LANES : 1;
            vf back = gap - max;
            rows->low[j] = ((max - (gap - back)) - (u[j] + back)) * stretch;
            gap *= stretch;
            gap = pick(gap < limit, gap, all(limit));
            part += keep(finite, gap);
            kept -= finite;
            u[j] = pick(finite, gap, all(NAN));
        }
        carry(part, sum);
        carry(__builtin_convertvector(kept, vf), rows->count);
    }
    EACH(l) {
        rows->top[l] = top[l];
        ((int64_t *)rows->bad)[l] = nan[l];
    }
    HALVES(h) rows->max[h] = half(&max, h);
    finish(rows, sum, 0);
    rows->in_float64 |= largest(sum) >= limit;
}

/* The gaps in float64; they are infinite for masked classes. */
static void gaps_64(const Problem *of, Rows *rows, int fetched) {
    double stretch = stretch_of(of);
    if (!fetched) fetch_64(&of->logits, &rows->at, rows->gap, -INFINITY);
    for (int64_t i = 0; i < 2 * rows->at.length; i++) rows->gap[i] = (rows->max[i % 2] - rows->gap[i]) * stretch;
}

/* From float64 to `gap` and, rounded, to `u`. */
static void load_64(const Problem *of, Rows *rows, vd *sum) {
    int64_t length = rows->at.length;
    float limit = 0x1p126f / (of->s > 1 ? (float)of->s : 1);
    vl nan[2] = {{0}}, top[2] = {{0}}, here[2] = {{0}};
    fetch_64(&of->logits, &rows->at, rows->gap, -INFINITY);
    HALVES(h) rows->max[h] = all64(-INFINITY);
    for (int64_t i = 0; i < 2 * length; i++) {
        vd a = rows->gap[i], *max = &rows->max[i % 2];
        *max = pick64(a > *max, a, *max);
        nan[i % 2] |= a != a;
    }
    if (rows->at.folded) {
        double most = most_of(lanes(rows->max));
        int64_t any = 0;
        EACH(l) any |= ((int64_t *)nan)[l], ((int64_t *)here)[l] = l;
        HALVES(h) rows->max[h] = all64(most), nan[h] = (vl){0} + any;
    }
    gaps_64(of, rows, 1);
    for (int64_t j = 0; j < length; j++) {
        Lanes rounded;
        HALVES(h) {
            vd gap = rows->gap[2 * j + h];
            vl finite = gap < INFINITY, zero = gap == 0;
            top[h] = (zero & here[h]) | (~zero & top[h]);
            here[h] += rows->at.folded ? LANES : 1;
            sum[h] += keep64(finite, gap);
            rows->count[h] += keep64(finite, all64(1));
            rounded[h] = pick64(finite, pick64(gap < limit, gap, all64(limit)), all64(NAN));
        }
        rows->u[j] = narrow(rounded), rows->low[j] = all(0);
    }
    EACH(l) rows->top[l] = ((int64_t *)top)[l];
    HALVES(h) rows->bad[h] = nan[h];
    finish(rows, sum, 0);
}

static void load(const Problem *of, Rows *rows) {
    Lanes sum = {0};
    memset(rows->count, 0, sizeof rows->count);
    rows->in_float64 |= is_64(of);
    is_64(of) ? load_64(of, rows, sum) : load_32(of, rows, sum);
    finish(rows, rows->count, 0);
    if (rows->at.folded) {
        int64_t last = 0;
        EACH(l) last = rows->top[l] > last ? rows->top[l] : last;
        EACH(l) rows->top[l] = last;
    }
    EACH(l) ((float *)rows->u)[place(&rows->at, rows->top[l], l)] = NAN;
    HALVES(h) {
        rows->bad[h] = (rows->bad[h] != 0) | ~((rows->max[h] > -INFINITY) & (rows->max[h] < INFINITY));
        /* core.start */
        vd log_n = log_(rows->count[h]), v = sum[h] / rows->count[h] * exp_(-of->s * log_n);
        vd bound = log_n - psi(v, -of->s);
        rows->m[h] = keep64((of->s * v < 1.0) & (bound > 0.0) & ~rows->bad[h], bound);
    }
}

/* Store the results `v`, times a factor per lane: NaN for bad rows, and 0 where `nothing` counts. */
static void put(const View *to, Rows *rows, const vd *factor, const vl *nothing) {
    Lanes times, counted;
    HALVES(h) times[h] = pick64(rows->bad[h], all64(NAN), factor[h]), counted[h] = keep64(~nothing[h], all64(1));
    vf times_32 = narrow(times);
    vi counts = narrow(counted) != 0;
    vf *x = rows->in_float64 ? rows->u : rows->v;
    for (int64_t j = 0; j < rows->at.length; j++) {
        if (!rows->in_float64) {
            x[j] = keep(counts, x[j] * times_32);
            continue;
        }
        vd *wide = rows->v_64 + 2 * j;
        HALVES(h) wide[h] = keep64(~nothing[h], wide[h] * times[h]);
        if (to->dtype != FLOAT64) x[j] = narrow(wide);
    }
    to->dtype == FLOAT64 ? store_64(to, &rows->at, rows->v_64) : store(to, &rows->at, x);
}
