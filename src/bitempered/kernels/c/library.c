/* The library's functions, which cpu.py calls. Everything else is in the files below, from the bottom up. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "memory.h"
#include "rows.h"
#include "solver.h"

/* What is the same in float32 and in float64 is a template: V is a vector of REAL numbers, MASK what compares them. */
#define REAL float
#define V vf
#define MASK vi
#define NAMED(x) x##_32
#define FABS fabsf
#define ABS(x) ((vf)((vi)(x) & INT32_MAX))
#define ALL all
#define KEEP keep
#define PICK pick
#define EXP exp_v
#define EXPM1 expm1_v
#define LOG1P(x) log1p_v(x, 1 + (x), 1)
#define LOG1P_PRODUCT(x, y) LOG1P((x) * (y))
#define LARGE 1e37f
#define LOG_OR(q) pick((q) > 1.2e-38f, log_v(q), all(LOG_0))
#define NEAR 0.25f  /* where the divergence is a series */
#define STEPS 3     /* of the solver of two classes */
#include "divergence.h"
#include "two_classes.h"
#undef REAL
#undef V
#undef MASK
#undef NAMED
#undef FABS
#undef ABS
#undef ALL
#undef KEEP
#undef PICK
#undef EXP
#undef EXPM1
#undef LOG1P
#undef LOG1P_PRODUCT
#undef LARGE
#undef LOG_OR
#undef NEAR
#undef STEPS
#define REAL double
#define V vd
#define MASK vl
#define NAMED(x) x##_64
#define FABS fabs
#define ABS abs64
#define ALL all64
#define KEEP keep64
#define PICK pick64
#define EXP exp_
#define EXPM1 expm1_
#define LOG1P log1p_
#define LOG1P_PRODUCT log1p_product
#define LARGE 1e300
#define LOG_OR(q) pick64((q) > 0.0, log_(q), all64(LOG_0))
#define NEAR 0.03
#define STEPS 4
#include "divergence.h"
#include "two_classes.h"

#include "target.h"
#include "label_loss.h"
#include "soft_loss.h"
#include "loss.h"
#include "binary.h"
#include "softmax.h"

/* OpenMP's entry point, from the library that torch itself uses; null for one thread. */
typedef void Parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

enum { FINE, BAD_TARGET, OUT_OF_MEMORY };

typedef struct { /* as in cpu.py */
    View logits, target, gradient;
    const int64_t *labels;
    const double *weight;
    const void *g;
    int64_t g_stride, n, inner, k, ignore_index, reduction;
    double t1, t2, smoothing, tolerance, stretch, outer;
    void *out; /* what the reduction leaves */
    Parallel *parallel;
    int64_t threads;
} LossCall;

int bitempered_loss(const LossCall *call) {
    double divisor = 0, sum = 0;
    int64_t n = call->n;
    for (int64_t i = 0; call->labels && i < n; i++) {
        int64_t y = call->labels[i];
        if (y == call->ignore_index) continue;
        if (y < 0 || y >= call->k) return BAD_TARGET;
        divisor += call->weight ? call->weight[y] : 1;
    }
    if (!call->labels) divisor = (double)n;
    Loss job = {.of = {.logits = call->logits, .n = n, .inner = call->inner, .k = call->k, .t1 = call->t1,
                       .t2 = call->t2, .s = call->t2 - 1, .stretch = call->stretch},
                .target = call->target, .gradient = call->gradient, .labels = call->labels, .weight = call->weight,
                .g = call->g, .g_stride = call->g_stride, .smoothing = call->smoothing, .outer = call->outer,
                .tolerance = call->tolerance,
                .ignore_index = call->ignore_index, .soft = call->smoothing > 0 || !call->labels,
                .losses = call->reduction == NONE ? call->out : NULL,
                .scale = call->reduction != MEAN ? 1 : divisor > 0 ? 1 / divisor : 0}; /* a mean of nothing has none */
    int64_t grains = n / grain_of(&job.of) + 1;
    vf *shared = NULL;
    job.sums = calloc((size_t)grains, sizeof(double));
    if (job.soft) shared = aligned_alloc(sizeof(vf), (size_t)(SIZE_OF_SHARED * block_length(&job.of)) * sizeof(vf));
    job.out_of_memory = !job.sums || (job.soft && !shared);
    if (shared && !job.out_of_memory) share_target(&job, shared);
    if (!job.out_of_memory && call->parallel && call->threads > 1 && n * call->k > GRAIN)
        call->parallel(work, &job, (unsigned)call->threads, 0);
    else if (!job.out_of_memory)
        work(&job);
    if (!job.out_of_memory && call->reduction != NONE) {
        for (int64_t i = 0; i < grains; i++) sum += job.sums[i];
        put_number(call->out, is_64(&job.of), call->reduction == SUM ? sum : divisor == 0 ? NAN : sum / divisor);
    }
    free(job.sums);
    free(shared);
    return job.out_of_memory ? OUT_OF_MEMORY : job.bad_target ? BAD_TARGET : FINE;
}

typedef struct { /* as in cpu.py */
    Operand logits, target, pos_weight, weight, g, out, gradient;
    int64_t n, dimensions, sizes[DIMENSIONS], reduction;
    double t1, t2, stretch, outer;
    void *reduced; /* or null */
    Parallel *parallel;
    int64_t threads;
} BinaryCall;

int bitempered_binary(const BinaryCall *call) {
    int64_t n = call->n, grains = n / BINARY_GRAIN + 1;
    Binary job = {.logits = call->logits, .target = call->target, .pos_weight = call->pos_weight,
                  .weight = call->weight, .g = call->g, .out = call->out, .gradient = call->gradient, .n = n,
                  .dimensions = call->dimensions,
                  .t1 = call->t1, .t2 = call->t2, .stretch = call->stretch, .outer = call->outer,
                  .scale = call->reduction == MEAN && n ? 1 / (double)n : 1,
                  .sums = calloc((size_t)grains, sizeof(double))};
    const Operand *all[] = {&job.logits, &job.target, &job.pos_weight, &job.weight, &job.g, &job.out, &job.gradient};
    job.plain = job.dimensions == 1;
    for (int i = 0; i < 7; i++) job.plain &= !all[i]->data || all[i]->strides[0] == 1;
    memcpy(job.sizes, call->sizes, sizeof job.sizes);
    if (!job.sums) return OUT_OF_MEMORY;
    if (call->parallel && call->threads > 1 && n > BINARY_GRAIN)
        call->parallel(work_binary, &job, (unsigned)call->threads, 0);
    else
        work_binary(&job);
    double sum = 0;
    for (int64_t i = 0; i < grains; i++) sum += job.sums[i];
    if (call->reduction == MEAN) sum /= (double)n;
    if (call->reduced) put_number(call->reduced, call->logits.dtype == FLOAT64, sum);
    free(job.sums);
    return FINE;
}

typedef struct { /* as in cpu.py */
    View logits, out, g, gradient;
    double *m, *partition;
    int64_t n, inner, k, what;
    double t, stretch;
    Parallel *parallel;
    int64_t threads;
} SoftmaxCall;

int bitempered_softmax(const SoftmaxCall *call) {
    Softmax job = {.of = {.logits = call->logits, .n = call->n, .inner = call->inner, .k = call->k, .t1 = 1,
                          .t2 = call->t, .s = call->t - 1, .stretch = call->stretch},
                   .out = call->out, .g = call->g, .gradient = call->gradient, .m = call->m,
                   .partition = call->partition, .what = call->what};
    if (call->parallel && call->threads > 1 && call->n * call->k > GRAIN)
        call->parallel(work_softmax, &job, (unsigned)call->threads, 0);
    else work_softmax(&job);
    return job.out_of_memory ? OUT_OF_MEMORY : FINE;
}
