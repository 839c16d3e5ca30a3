/* The targets of a loss: class indices, smoothed or not, or class probabilities.

   With class weights w, smoothing e and z = w ((1 - e) y + e / K), they are W = sum z and q = z / W. */

enum { NONE, SUM, MEAN };

typedef struct {
    Problem of;
    View target, gradient;      /* probabilities, or nothing; the gradient may be nothing */
    const int64_t *labels;      /* class indices, or null */
    const double *weight;       /* one per class, or null */
    const void *g;              /* what multiplies the gradient of each row, in the dtype of the losses; or null */
    int64_t g_stride;
    double smoothing, scale;    /* scale: 1 over what a mean divides by */
    double outer, tolerance;    /* outer multiplies loss and gradient; how far the sum of probabilities may be from 1 */
    int64_t ignore_index, soft; /* soft: smoothed, or probabilities */
    void *losses;               /* per row, in float64 as the logits, or else in float32; or null */
    double *sums;               /* per grain */
    /* Per class, as blocks: the target without label or probabilities, its log, its power 1 - t1; and the weight. */
    vd *z, *log_z, *z_power, *w;
    vf *z_32, *log_z_32, *w_32;
    double z_sum;
    int64_t next;                 /* the first grain that no thread has taken */
    int float32_enough;           /* for a soft target, as far as temperatures and z tell */
    int bad_target, out_of_memory;
} Loss;

typedef struct {
    Rows rows;
    int64_t label[LANES];
    vl is_top[2];                       /* whose label is the top */
    Lanes W, scale;                     /* scale: W over what a mean divides by */
    Lanes p_power;                      /* y_hat^(t2 - t1) of the top */
    Lanes h, e_sum, v_sum, loss;        /* sums of the last pass, without the top */
    Lanes z_top, z_label, x, d, T;      /* of the label: its z, s u e^(-s m), -log y_hat, y_hat^(t2 - t1) */
    const vd *z, *log_z, *z_power;      /* as those of Loss, or of probabilities */
    const vf *z_32, *log_z_32;
    vd *own_64;                         /* memory for those of probabilities */
    vf *own_32;
} Block;

#define LOG_0_32 -69.0f  /* of z = 0 or next to it in float32 */
#define TINY_32 0x1p-99f

INLINE double z_of(const Loss *job, int64_t class) {
    return job->smoothing == 0 ? 0 : job->smoothing / job->of.k * (job->weight ? job->weight[class] : 1);
}

/* What all rows share of a soft target. */

enum { SIZE_OF_SHARED = 11 }; /* in vf per vector of a block */
static void share_target(Loss *job, vf *memory) {
    int64_t length = block_length(&job->of), size = 2 * length, times = is_folded(&job->of) ? 1 : LANES;
    job->z = (vd *)memory, job->log_z = job->z + size, job->z_power = job->log_z + size, job->w = job->z_power + size;
    job->z_32 = memory + 8 * length, job->log_z_32 = job->z_32 + length, job->w_32 = job->log_z_32 + length;
    memset(memory, 0, SIZE_OF_SHARED * length * sizeof(vf));
    job->float32_enough = job->of.s >= 0 && job->of.t1 <= 1.5 && !is_64(&job->of);
    for (int64_t i = 0; i < job->of.k; i++) {
        double z = z_of(job, i), w = job->weight ? job->weight[i] : 1;
        job->z_sum += z;
        job->float32_enough &= z == 0 || (z > TINY_32 && z < 1 / TINY_32);
        for (int64_t l = 0; l < times; l++) {
            lanes(job->z)[i * times + l] = z, lanes(job->w)[i * times + l] = w;
            ((float *)job->z_32)[i * times + l] = (float)z, ((float *)job->w_32)[i * times + l] = (float)w;
        }
    }
    for (int64_t i = 0; i < size; i++) {
        vl some = job->z[i] > 0.0;
        vd log_z = log_(job->z[i]);
        job->log_z[i] = pick64(some, log_z, all64(LOG_0));
        job->z_power[i] = keep64(some, exp_((1 - job->of.t1) * log_z));
    }
    for (int64_t j = 0; j < length; j++) {
        Lanes log_z;
        HALVES(h) log_z[h] = pick64(job->z[2 * j + h] > 0.0, job->log_z[2 * j + h], all64(LOG_0_32));
        job->log_z_32[j] = narrow(log_z);
    }
}

/* Class indices: W, and the part of the target that is the label's alone. */
static void take_labels(const Loss *job, Block *b, int64_t first) {
    EACH(l) {
        int64_t y = job->labels[row_of(&b->rows.at, first, l)];
        int ignored = y == job->ignore_index;
        double w = ignored ? 0 : job->weight ? job->weight[y] : 1, z_label = (1 - job->smoothing) * w;
        double W = ignored ? 0 : z_label + job->z_sum;
        b->label[l] = ignored ? 0 : y;
        lanes(b->z_label)[l] = z_label, lanes(b->W)[l] = W;
    }
    b->z = job->z, b->log_z = job->log_z, b->z_power = job->z_power;
    b->z_32 = job->z_32, b->log_z_32 = job->log_z_32;
}

INLINE void check_sums(const Loss *job, const Block *b, vd *sum, vl *negative) {
    int bad = 0;
    finish(&b->rows, sum, 0);
    for (int l = 0; l < b->rows.at.used; l++) bad |= !(fabs(lanes(sum)[l] - 1) <= job->tolerance);
    EACH(l) bad |= ((int64_t *)negative)[l] != 0;
    if (bad) __atomic_store_n((int *)&job->bad_target, 1, __ATOMIC_RELAXED);
}

/* Class probabilities in float32. Sends the block to float64 if one is too small for it. */
static void take_probabilities(const Loss *job, Block *b) {
    const Place *at = &b->rows.at;
    vf *z = b->own_32, *log_z = z + at->length, share = all((float)(1 - job->smoothing));
    Lanes sum = {0}, W = {0};
    vl negative[2] = {{0}};
    vi wrong = {0}, tiny = {0};
    fetch(&job->target, at, z, 0);
    for (int64_t start = 0; start < at->length; start += CHUNK) {
        vf part = {0}, part_W = {0};
        for (int64_t j = start; j < least(start + CHUNK, at->length); j++) {
            vf y = z[j];
            part += y;
            wrong |= ~(y >= 0);
            y = (y * share) * job->w_32[j] + job->z_32[j];
            vi some = (y > TINY_32) & (y < 1 / TINY_32);
            tiny |= (y > 0) & ~some;
            part_W += y;
            z[j] = y;
            log_z[j] = pick(some, log_v(pick(some, y, all(1))), all(LOG_0_32));
        }
        carry(part, sum), carry(part_W, W);
    }
    EACH(l) ((int64_t *)negative)[l] = wrong[l];
    check_sums(job, b, sum, negative);
    finish(&b->rows, W, 0);
    memcpy(b->W, W, sizeof W);
    EACH(l) b->rows.in_float64 |= tiny[l] != 0;
    b->z_32 = z, b->log_z_32 = log_z;
}

static void take_probabilities_64(const Loss *job, Block *b) {
    const Place *at = &b->rows.at;
    int64_t size = 2 * at->length;
    vd *z = b->own_64, *log_z = z + size, *z_power = log_z + size;
    Lanes sum = {0}, W = {0};
    vl negative[2] = {{0}};
    fetch_64(&job->target, at, z, 0);
    for (int64_t i = 0; i < size; i++) {
        int h = i % 2;
        sum[h] += z[i];
        negative[h] |= ~(z[i] >= 0);
        z[i] = z[i] * (1 - job->smoothing) * job->w[i] + job->z[i];
        W[h] += z[i];
        vl some = z[i] > 0.0;
        vd log = log_(z[i]);
        log_z[i] = pick64(some, log, all64(LOG_0));
        z_power[i] = keep64(some, exp_((1 - job->of.t1) * log));
    }
    check_sums(job, b, sum, negative);
    finish(&b->rows, W, 0);
    memcpy(b->W, W, sizeof W);
    b->z = z, b->log_z = log_z, b->z_power = z_power;
}
