/* The binary loss and the tempered sigmoid of every element of some tensors, broadcast against each other. */

enum { DIMENSIONS = 8, BINARY_GRAIN = 4096 };

typedef struct { /* one of the tensors, with strides in elements; no data: 1 everywhere */
    char *data;
    int64_t dtype, strides[DIMENSIONS];
} Operand;

typedef struct {
    Operand logits, target, pos_weight, weight, g; /* no target: the sigmoid */
    Operand out, gradient;                         /* the loss or sigmoid; either may be nothing */
    int64_t n, dimensions, sizes[DIMENSIONS];
    int plain; /* whether all are contiguous */
    double t1, t2, stretch, outer, scale; /* stretch multiplies the logits; outer and scale as in Loss */
    double *sums;                         /* per grain */
    int64_t next;
} Binary;

typedef struct { /* the next elements: coordinates of each lane */
    int64_t at[LANES][DIMENSIONS];
    int used;
} Elements;

static void find(const Binary *job, int64_t first, Elements *these) {
    int64_t rest = first, last = job->dimensions - 1;
    these->used = (int)least(LANES, job->n - first);
    for (int64_t d = last; d >= 0; d--) these->at[0][d] = rest % job->sizes[d], rest /= job->sizes[d];
    for (int l = 1; l < LANES; l++) {
        memcpy(these->at[l], these->at[l - 1], sizeof these->at[l]);
        if (l < these->used)
            for (int64_t d = last; d >= 0 && ++these->at[l][d] == job->sizes[d]; d--) these->at[l][d] = 0;
    }
}

INLINE int64_t offset(const Binary *job, const Operand *x, const Elements *these, int l) {
    int64_t sum = 0;
    for (int64_t d = 0; d < job->dimensions; d++) sum += these->at[l][d] * x->strides[d];
    return sum;
}
INLINE int is_plain(const Binary *job, const Operand *x, int used) {
    return job->dimensions == 1 && x->strides[0] == 1 && used == LANES;
}

INLINE void read_as(const Binary *job, const Operand *x, int64_t first, const Elements *these, vf *to, vd *wide,
                    const int DTYPE) {
    const int SIZE = size_of(DTYPE);
    char raw[8 * LANES];
    const char *from = x->data + first * SIZE;
    if (!is_plain(job, x, these->used)) {
        EACH(l) memcpy(raw + l * SIZE, x->data + offset(job, x, these, l) * SIZE, SIZE);
        from = raw;
    }
    if (DTYPE == FLOAT64) memcpy(wide, from, 2 * sizeof(vd)), *to = narrow(wide);
    else *to = read_vector(from, DTYPE);
    if (DTYPE != FLOAT64) HALVES(h) wide[h] = half(to, h);
}
static void read_elements(const Binary *job, const Operand *x, int64_t first, const Elements *these, vf *to, vd *wide) {
    if (!x->data) {
        *to = all(1), wide[0] = wide[1] = all64(1);
        return;
    }
    switch (x->dtype) {
        case FLOAT32: read_as(job, x, first, these, to, wide, FLOAT32); break;
        case BFLOAT16: read_as(job, x, first, these, to, wide, BFLOAT16); break;
        case FLOAT16: read_as(job, x, first, these, to, wide, FLOAT16); break;
        default: read_as(job, x, first, these, to, wide, FLOAT64);
    }
}
INLINE void write_as(const Binary *job, const Operand *x, int64_t first, const Elements *these, const vd *from,
                     const int DTYPE) {
    const int SIZE = size_of(DTYPE);
    char raw[8 * LANES];
    int plain = is_plain(job, x, these->used);
    char *to = plain ? x->data + first * SIZE : raw;
    if (DTYPE == FLOAT64) memcpy(to, from, 2 * sizeof(vd));
    else write_vector(to, narrow(from), DTYPE);
    for (int l = 0; !plain && l < these->used; l++)
        memcpy(x->data + offset(job, x, these, l) * SIZE, raw + l * SIZE, SIZE);
}
static void write_elements(const Binary *job, const Operand *x, int64_t first, const Elements *these, const vd *from) {
    if (!x->data) return;
    switch (x->dtype) {
        case FLOAT32: write_as(job, x, first, these, from, FLOAT32); break;
        case BFLOAT16: write_as(job, x, first, these, from, BFLOAT16); break;
        case FLOAT16: write_as(job, x, first, these, from, FLOAT16); break;
        default: write_as(job, x, first, these, from, FLOAT64);
    }
}

typedef struct { /* a group of elements */
    vf a[GROUP], y[GROUP], w[GROUP];
    vd a_64[2 * GROUP], y_64[2 * GROUP], w_64[2 * GROUP];
    vd value[2 * GROUP], gradient[2 * GROUP];
} Group;

INLINE void compute_32(const Binary *job, Group *x, const int KIND) {
    vf u[GROUP];
    Two_32 at[GROUP];
    TOGETHER(i) u[i] = (vf)((vi)x->a[i] & INT32_MAX);
    solve_two_32(u, at, job->t2, KIND);
    TOGETHER(i) {
        Result_32 of = job->target.data ? binary_32(x->a[i], x->y[i], x->w[i], at[i], job->t1, job->t2, KIND)
                                        : sigmoid_32(x->a[i], at[i], job->t2);
        HALVES(h) x->value[2 * i + h] = half(&of.value, h), x->gradient[2 * i + h] = half(&of.gradient, h);
    }
}
INLINE void compute_64(const Binary *job, Group *x, const int KIND) {
    for (int first = 0; first < 2 * GROUP; first += GROUP) {
        vd u[GROUP], *a = x->a_64 + first;
        Two_64 at[GROUP];
        TOGETHER(i) u[i] = abs64(a[i]);
        solve_two_64(u, at, job->t2, KIND);
        TOGETHER(i) {
            vd y = x->y_64[first + i], w = x->w_64[first + i];
            Result_64 of = job->target.data ? binary_64(a[i], y, w, at[i], job->t1, job->t2, KIND)
                                            : sigmoid_64(a[i], at[i], job->t2);
            x->value[first + i] = of.value, x->gradient[first + i] = of.gradient;
        }
    }
}

/* Float32 is enough but for a finite support, whose edge shows rounding, for logits near its largest number, and for
   targets and weights near its smallest, whose logarithms and reciprocals it does not have. */
static void compute(const Binary *job, Group *x) {
    double s = job->t2 - 1;
    int wide = job->logits.dtype == FLOAT64 || s < 0;
    TOGETHER(i) EACH(l) wide |= fabs(lanes(x->a_64 + 2 * i)[l]) > 1e30 && fabs(lanes(x->a_64 + 2 * i)[l]) < INFINITY;
    if (job->target.data) TOGETHER(i) EACH(l) wide |= x->y[i][l] > 0 && x->y[i][l] < 1e-30f;
    if (job->pos_weight.data) TOGETHER(i) EACH(l) wide |= x->w[i][l] > 0 && (x->w[i][l] < 1e-7f || x->w[i][l] > 1e7f);
    if (!wide) s > 0 ? compute_32(job, x, 1) : compute_32(job, x, 0);
    else if (s < 0) compute_64(job, x, -1);
    else s > 0 ? compute_64(job, x, 1) : compute_64(job, x, 0);
}

static double write_results(const Binary *job, int64_t first, const Elements *these, vd *value, vd *gradient) {
    vf unused;
    double sum = 0;
    Lanes times, g;
    if (!job->target.data) { /* the sigmoid */
        HALVES(h) gradient[h] *= job->stretch;
        write_elements(job, &job->out, first, these, value);
        write_elements(job, &job->gradient, first, these, gradient);
        return 0;
    }
    read_elements(job, &job->weight, first, these, &unused, times);
    HALVES(h) value[h] = keep64(times[h] != 0.0, value[h] * times[h] * job->outer);
    write_elements(job, &job->out, first, these, value);
    for (int l = 0; l < these->used; l++) sum += lanes(value)[l];
    if (!job->gradient.data) return sum;
    read_elements(job, &job->g, first, these, &unused, g);
    HALVES(h) {
        vd factor = times[h] * (job->outer * job->stretch * job->scale) * g[h];
        gradient[h] = keep64(times[h] != 0.0, gradient[h] * factor);
    }
    write_elements(job, &job->gradient, first, these, gradient);
    return sum;
}

static void elements(Binary *job, int64_t first) {
    Elements these[GROUP];
    Group x;
    int64_t vectors = least(GROUP, (job->n - first + LANES - 1) / LANES);
    memset(x.a, 0, sizeof x.a), memset(x.a_64, 0, sizeof x.a_64);
    memset(x.y, 0, sizeof x.y), memset(x.w, 0, sizeof x.w);
    for (int64_t i = 0; i < vectors; i++) {
        int64_t at = first + i * LANES;
        these[i].used = LANES;
        if (!job->plain || at + LANES > job->n) find(job, at, &these[i]);
        read_elements(job, &job->logits, at, &these[i], &x.a[i], x.a_64 + 2 * i);
        if (job->target.data) read_elements(job, &job->target, at, &these[i], &x.y[i], x.y_64 + 2 * i);
        read_elements(job, &job->pos_weight, at, &these[i], &x.w[i], x.w_64 + 2 * i);
        x.a[i] *= (float)job->stretch;
        HALVES(h) x.a_64[2 * i + h] *= job->stretch;
    }
    compute(job, &x);
    for (int64_t i = 0; i < vectors; i++)
        job->sums[first / BINARY_GRAIN] +=
            write_results(job, first + i * LANES, &these[i], x.value + 2 * i, x.gradient + 2 * i);
}

static void work_binary(void *data) {
    Binary *job = data;
    for (int64_t i; (i = __atomic_fetch_add(&job->next, BINARY_GRAIN, __ATOMIC_RELAXED)) < job->n;)
        for (int64_t first = i; first < least(i + BINARY_GRAIN, job->n); first += GROUP * LANES) elements(job, first);
}
