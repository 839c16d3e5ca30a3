/* The library's functions, which cpu.py calls. Everything else is in the files below, from the bottom up. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"
#include "memory.h"
#include "rows.h"
#include "solver.h"
#include "target.h"
#include "label_loss.h"
#include "soft_loss.h"
#include "loss.h"

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
    void *losses;
    double *reduced;
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
                .g = call->g, .g_stride = call->g_stride, .smoothing = call->smoothing, .outer = call->outer, .tolerance = call->tolerance,
                .ignore_index = call->ignore_index, .soft = call->smoothing > 0 || !call->labels,
                .losses = call->losses,
                .scale = call->reduction != MEAN ? 1 : divisor > 0 ? 1 / divisor : 0}; /* a mean of nothing has none */
    int64_t grains = n / grain_of(&job.of) + 1;
    vf *shared = NULL;
    job.sums = calloc((size_t)grains, sizeof(double));
    if (job.soft) shared = aligned_alloc(sizeof(vf), (size_t)(11 * block_length(&job.of)) * sizeof(vf));
    job.out_of_memory = !job.sums || (job.soft && !shared);
    if (shared && !job.out_of_memory) share_target(&job, shared);
    if (!job.out_of_memory && call->parallel && call->threads > 1 && n * call->k > GRAIN)
        call->parallel(work, &job, (unsigned)call->threads, 0);
    else if (!job.out_of_memory)
        work(&job);
    if (!job.out_of_memory && call->reduction != NONE) {
        for (int64_t i = 0; i < grains; i++) sum += job.sums[i];
        *call->reduced = call->reduction == SUM ? sum : divisor == 0 ? NAN : sum / divisor;
    }
    free(job.sums);
    free(shared);
    return job.out_of_memory ? OUT_OF_MEMORY : job.bad_target ? BAD_TARGET : FINE;
}
