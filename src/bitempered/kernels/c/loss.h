/* Blocks of the loss over classes: solve, sum, conclude, store. */

#define FOR_KIND(name, KIND)                                                     \
    static __attribute__((noinline)) void name(const Loss *job, Block *b) {      \
        solve(&job->of, &b->rows, KIND);                                         \
        if (b->rows.in_float64) {                                                \
            solve_64(&job->of, &b->rows, KIND);                                  \
            if (!job->soft) wide_pass(job, b, KIND, 0, 0);                       \
            else if (is_64(&job->of)) wide_pass(job, b, KIND, 1, 1);             \
            else wide_pass(job, b, KIND, 1, 0);                                  \
        } else if (job->soft) soft_pass(job, b, KIND);                           \
        else if (job->gradient.data) label_pass(job, b, KIND, 1);                \
        else label_pass(job, b, KIND, 0);                                        \
    }
FOR_KIND(below_1, -1)
FOR_KIND(at_1, 0)
FOR_KIND(above_1, 1)

static void solve_and_sum(const Loss *job, Block *b) {
    Rows *rows = &b->rows;
    /* Once, unless rounding misled it or float32 is not enough. */
    for (int attempt = 0; attempt < 4 || rows->in_float64; attempt++) {
        int wide = rows->in_float64;
        double s = job->of.s;
        if (wide) {
            if (!is_64(&job->of)) gaps_64(&job->of, rows, 0);
            EACH(l) lanes(rows->gap)[place(&rows->at, rows->top[l], l)] = NAN;
            if (!job->labels) take_probabilities_64(job, b);
            HALVES(h) b->scale[h] = b->W[h] * job->scale;
        }
        s < 0 ? below_1(job, b) : s > 0 ? above_1(job, b) : at_1(job, b);
        if (wide) return;
        if (rows->in_float64) continue;
        Lanes off;
        HALVES(h) off[h] = abs64((1 + rows->r[h]) * rows->p[h] - 1);
        if (largest(off) < 1e-6) return;
    }
}

static void block(const Loss *job, int64_t first, Block *b) {
    Rows *rows = &b->rows;
    const Problem *of = &job->of;
    double t1 = of->t1, t2 = of->t2, s = of->s;
    Lanes gap, factor;
    vl nothing[2];
    go_to(of, &rows->at, first);
    rows->in_float64 = is_64(of) || (job->soft && !job->float32_enough);
    if (job->labels) take_labels(job, b, first);
    else if (!rows->in_float64) take_probabilities(job, b);
    if (!rows->in_float64 || job->labels) {
        HALVES(h) b->scale[h] = b->W[h] * job->scale;
        rows->in_float64 |= largest(b->scale) > MAGNIFIED;
    }
    load(of, rows);
    if (!job->labels) memcpy(b->label, rows->top, sizeof b->label);
    EACH(l) rows->in_float64 |= job->soft && lanes(rows->count)[l] < of->k; /* q of a masked class may not be 0 */
    solve_and_sum(job, b);
    EACH(l) {
        int64_t top = place(&rows->at, rows->top[l], l);
        ((int64_t *)b->is_top)[l] = -(b->label[l] == rows->top[l]);
        lanes(gap)[l] =
            (lanes(rows->max)[l] - number_at(&of->logits, &rows->at, b->label[l], l)) * stretch_of(of);
        if (job->labels) {
            lanes(b->z_top)[l] = z_of(job, rows->top[l]);
            lanes(b->z_label)[l] += z_of(job, b->label[l]);
        } else {
            lanes(b->z_top)[l] = rows->in_float64 ? lanes((vd *)b->z)[top] : ((const float *)b->z_32)[top];
            lanes(b->z_label)[l] = lanes(b->z_top)[l];
        }
    }
    HALVES(h) {
        vd factor = s * rows->decay[h], x = s == 0 ? all64(0) : gap[h] * factor;
        vd to_label = s == 0 ? gap[h] : log1p_product(gap[h], factor) / s;
        vd d = pick64(gap[h] < INFINITY, rows->m[h] + to_label, all64(INFINITY)), one = all64(1);
        b->x[h] = x, b->d[h] = d;
        b->T[h] = t1 < t2 ? exp_((t1 - t2) * d) : s < 0 ? keep64(1 + x > -ON_EDGE, one) : one;
    }
    rows->in_float64 || job->soft ? conclude_soft(job, b) : conclude_label(job, b);
    EACH(l) ((int64_t *)nothing)[l] = -(lanes(b->W)[l] == 0);
    for (int l = 0; l < rows->at.used; l++) {
        double loss = lanes(b->W)[l] * lanes(b->loss)[l] * job->outer;
        loss = lanes(b->W)[l] == 0 ? 0 : ((int64_t *)rows->bad)[l] ? NAN : loss < 0 ? 0 : loss;
        if (job->losses) put_number((char *)job->losses + (first + l) * (is_64(of) ? 8 : 4), is_64(of), loss);
        job->sums[first / grain_of(of)] += loss;
    }
    if (!job->gradient.data) return;
    EACH(l) {
        int64_t row = row_of(&rows->at, first, l) * job->g_stride;
        double g = !job->g ? 1 : is_64(of) ? ((const double *)job->g)[row] : ((const float *)job->g)[row];
        lanes(factor)[l] = job->outer * of->stretch * g;
    }
    put(&job->gradient, rows, factor, nothing);
}

static void work(void *data) {
    Loss *job = data;
    const Problem *of = &job->of;
    int folded = is_folded(of), size = SIZE_OF_ROWS + (job->labels ? 0 : 8);
    Block b = {.rows = {.at = {.folded = folded, .length = block_length(of), .k = of->k}}};
    int64_t length = b.rows.at.length, grain = grain_of(of);
    vf *memory = aligned_alloc(sizeof(vf), (size_t)(size * length) * sizeof(vf));
    if (!memory) {
        __atomic_store_n(&job->out_of_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    use_memory(&b.rows, memory);
    b.own_64 = (vd *)(memory + SIZE_OF_ROWS * length), b.own_32 = (vf *)(b.own_64 + 6 * length);
    for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) * grain < of->n;) {
        int64_t end = least((i + 1) * grain, of->n);
        for (int64_t row = i * grain; row < end; row += folded ? 1 : LANES) block(job, row, &b);
    }
    free(memory);
}
