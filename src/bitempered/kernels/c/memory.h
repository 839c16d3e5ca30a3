/* Numbers in memory: their dtypes, and blocks of rows wherever their classes lie. */

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

typedef struct { /* a tensor (outer, classes, inner), with strides in elements; row i is (i / inner, i % inner) */
    char *data;
    int64_t dtype, outer, class, inner;
} View;

typedef struct { /* the rows of a block: LANES side by side, or one folded into LANES columns */
    int folded, used;     /* used: how many lanes stand for a row each */
    int64_t length, k;    /* in vectors, in classes */
    int64_t outer[LANES], inner[LANES];
} Place;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t place(const Place *at, int64_t class, int l) { return at->folded ? class : class * LANES + l; }
INLINE int64_t row_of(const Place *at, int64_t first, int l) { /* unused lanes repeat the last row */
    return first + (at->folded ? 0 : least(l, at->used - 1));
}
INLINE int size_of(const int DTYPE) { return DTYPE == FLOAT64 ? 8 : DTYPE == FLOAT32 ? 4 : 2; }
INLINE int64_t start_of(const View *x, const Place *at, int l) {
    return at->outer[l] * x->outer + at->inner[l] * x->inner;
}
/* Whether a vector is contiguous in memory. */
INLINE int is_adjacent(const View *x, const Place *at) {
    if (at->folded) return x->class == 1;
    return at->used == LANES && x->inner == 1 && at->outer[0] == at->outer[LANES - 1];
}

/* LANES numbers from memory, or into it. */
INLINE vf read_vector(const void *from, const int DTYPE) {
    if (DTYPE == FLOAT32) {
        vf x;
        memcpy(&x, from, sizeof x);
        return x;
    }
    if (DTYPE == FLOAT64) {
        Lanes x;
        memcpy(x, from, sizeof x);
        return narrow(x);
    }
    vs half_bits;
    memcpy(&half_bits, from, sizeof half_bits);
    vw bits = __builtin_convertvector(half_bits, vw);
    if (DTYPE == BFLOAT16) return (vf)(bits << 16);
    vw size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
    vf tiny = __builtin_convertvector((vi)size, vf) * 0x1p-24f;
    vw normal = (size << 13) + (112U << 23), special = normal | 0x7f800000;
    vf x = pick((vi)size < 0x400, tiny, pick((vi)size < 0x7c00, (vf)normal, (vf)special));
    return (vf)((vw)x | sign);
}
INLINE void write_vector(void *to, vf x, const int DTYPE) { /* rounds to the nearest, ties to even */
    if (DTYPE == FLOAT32) {
        memcpy(to, &x, sizeof x);
        return;
    }
    vw bits = (vw)x, size = bits & 0x7fffffff, sign = bits >> 31 << 15, made;
    if (DTYPE == BFLOAT16) {
        made = (size + 0x7fff + (size >> 16 & 1)) >> 16;
    } else {
        vw tiny = (vw)((vf)size + 0.5f) - (126U << 23); /* the sum's last place is float16's smallest number */
        vw normal = (size - (112U << 23) + 0xfff + (size >> 13 & 1)) >> 13;
        vw infinite = 0x7c00 + (vw){0};
        made = (vw)pick((vi)size < 0x477ff000, (vf)normal, (vf)infinite);
        made = (vw)pick((vi)size < (113 << 23), (vf)tiny, (vf)made);
    }
    made = (vw)pick(x != x, (vf)(0x7fc0 + (vw){0}), (vf)made) | sign; /* NaN in both */
    vs half_bits = __builtin_convertvector(made, vs);
    memcpy(to, &half_bits, sizeof half_bits);
}

/* One vector of a block: adjacent in memory, or gathered. Lanes beyond the last class are `beyond`. */
INLINE void gather(char *to, const View *x, const Place *at, int64_t j, const int64_t *start, const int SIZE) {
    EACH(l) {
        int64_t class = at->folded ? j * LANES + l : j;
        if (class < at->k) memcpy(to + l * SIZE, x->data + (start[at->folded ? 0 : l] + class * x->class) * SIZE, SIZE);
    }
}
INLINE void scatter(const char *from, const View *x, const Place *at, int64_t j, const int64_t *start, const int SIZE) {
    for (int l = 0; l < (at->folded ? LANES : at->used); l++) {
        int64_t class = at->folded ? j * LANES + l : j;
        char *to = x->data + (start[at->folded ? 0 : l] + class * x->class) * SIZE;
        if (class < at->k) memcpy(to, from + l * SIZE, SIZE);
    }
}
INLINE void starts(const View *x, const Place *at, int64_t *start) { EACH(l) start[l] = start_of(x, at, l); }
INLINE int64_t whole_vectors(const View *x, const Place *at) {
    return !is_adjacent(x, at) ? 0 : at->folded ? at->k / LANES : at->length;
}
INLINE const char *vector_at(const View *x, const Place *at, int64_t j, const int64_t *start, const int SIZE) {
    return x->data + (start[0] + j * (at->folded ? LANES : x->class)) * SIZE;
}

INLINE void fetch_as(const View *x, const Place *at, vf *to, float beyond, const int DTYPE) {
    const int SIZE = size_of(DTYPE);
    int64_t start[LANES], whole = whole_vectors(x, at);
    starts(x, at, start);
    for (int64_t j = 0; j < whole; j++) to[j] = read_vector(vector_at(x, at, j, start, SIZE), DTYPE);
    for (int64_t j = whole; j < at->length; j++) {
        char raw[8 * LANES] = {0};
        gather(raw, x, at, j, start, SIZE);
        to[j] = read_vector(raw, DTYPE);
    }
    if (at->folded)
        for (int64_t i = at->k; i < at->length * LANES; i++) ((float *)to)[i] = beyond;
}
static void fetch(const View *x, const Place *at, vf *to, float beyond) {
    switch (x->dtype) {
        case FLOAT32: fetch_as(x, at, to, beyond, FLOAT32); break;
        case BFLOAT16: fetch_as(x, at, to, beyond, BFLOAT16); break;
        case FLOAT16: fetch_as(x, at, to, beyond, FLOAT16); break;
        default: fetch_as(x, at, to, beyond, FLOAT64);
    }
}

INLINE void fetch_64_as(const View *x, const Place *at, vd *to, double beyond, const int DTYPE) {
    const int SIZE = size_of(DTYPE);
    int64_t start[LANES], whole = whole_vectors(x, at);
    starts(x, at, start);
    for (int64_t j = 0; j < at->length; j++) {
        char raw[8 * LANES] = {0};
        const char *from = j < whole ? vector_at(x, at, j, start, SIZE) : raw;
        if (j >= whole) gather(raw, x, at, j, start, SIZE);
        if (DTYPE == FLOAT64) {
            memcpy(to + 2 * j, from, 2 * sizeof(vd));
        } else {
            vf read = read_vector(from, DTYPE);
            HALVES(h) to[2 * j + h] = half(&read, h);
        }
    }
    if (at->folded)
        for (int64_t i = at->k; i < at->length * LANES; i++) lanes(to)[i] = beyond;
}
static void fetch_64(const View *x, const Place *at, vd *to, double beyond) {
    switch (x->dtype) {
        case FLOAT32: fetch_64_as(x, at, to, beyond, FLOAT32); break;
        case BFLOAT16: fetch_64_as(x, at, to, beyond, BFLOAT16); break;
        case FLOAT16: fetch_64_as(x, at, to, beyond, FLOAT16); break;
        default: fetch_64_as(x, at, to, beyond, FLOAT64);
    }
}

INLINE void store_as(const View *x, const Place *at, const vf *from, const int DTYPE) {
    const int SIZE = size_of(DTYPE);
    int64_t start[LANES], whole = whole_vectors(x, at);
    starts(x, at, start);
    for (int64_t j = 0; j < whole; j++) write_vector((char *)vector_at(x, at, j, start, SIZE), from[j], DTYPE);
    for (int64_t j = whole; j < at->length; j++) {
        char raw[8 * LANES];
        write_vector(raw, from[j], DTYPE);
        scatter(raw, x, at, j, start, SIZE);
    }
}
static void store(const View *x, const Place *at, const vf *from) { /* not float64 */
    switch (x->dtype) {
        case FLOAT32: store_as(x, at, from, FLOAT32); break;
        case BFLOAT16: store_as(x, at, from, BFLOAT16); break;
        default: store_as(x, at, from, FLOAT16);
    }
}
static void store_64(const View *x, const Place *at, const vd *from) {
    int64_t start[LANES], whole = whole_vectors(x, at);
    starts(x, at, start);
    for (int64_t j = 0; j < at->length; j++) {
        if (j < whole) memcpy((char *)vector_at(x, at, j, start, 8), from + 2 * j, 2 * sizeof(vd));
        else scatter((const char *)(from + 2 * j), x, at, j, start, 8);
    }
}

/* One number. */
static double number_at(const View *x, const Place *at, int64_t class, int l) {
    const char *from = x->data + (start_of(x, at, l) + class * x->class) * size_of((int)x->dtype);
    char raw[8 * LANES] = {0};
    memcpy(raw, from, (size_t)size_of((int)x->dtype));
    double number;
    memcpy(&number, raw, sizeof number);
    if (x->dtype == FLOAT64) return number;
    if (x->dtype == FLOAT32) return read_vector(raw, FLOAT32)[0];
    return (x->dtype == BFLOAT16 ? read_vector(raw, BFLOAT16) : read_vector(raw, FLOAT16))[0];
}
static void put_number(void *to, int wide, double number) {
    if (wide) *(double *)to = number;
    else *(float *)to = (float)number;
}
