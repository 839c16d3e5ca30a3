/* The binary loss and the tempered sigmoid of vectors of logits a against 0. A template, as divergence.h. The solver
   takes a GROUP of vectors together, since each waits for its own last result most of the time.

   With two classes the probabilities are e^(-m) and e^(-m) r. */

typedef struct { /* of the smaller probability: log r, r, r^s, s u e^(-s m); inside: where r is not 0 */
    V m, log_r, r, over_w, x;
    MASK inside;
} NAMED(Two);

/* For t2 >= 1 by Newton's method for l = -log r, which solves l = psi_s(u e^(-s m)) with m = log(1 + e^(-l)). The slope
   is between 1/2 and 1. From m = log 2 on, STEPS of them reach rounding error for every gap and every t up to 100, and
   one fewer for t <= 1.25. Below 1 by Newton's method for m, as core does. */
INLINE void NAMED(solve_two)(const V *u, NAMED(Two) *at, double t, const int KIND) {
    REAL s = (REAL)(t - 1), over_s = KIND ? 1 / s : 1;
    V gap[GROUP], l[GROUP];
    TOGETHER(i) {
        at[i].inside = u[i] < INFINITY;
        gap[i] = KEEP(at[i].inside, u[i]);
        at[i].m = at[i].x = ALL(0);
    }
    if (KIND < 0) {
        for (int step = 0, left = 1; left; step++) {
            left = 0;
            TOGETHER(i) {
                V m = at[i].m, x = s * gap[i] * EXP(-s * m), w = 1 + x, log_r = LOG1P(x) * -over_s;
                MASK in = (u[i] < INFINITY) & (w > 0);
                V r = KEEP(in, EXP(log_r)), over_w = KEEP(in, 1 / w), r_t = r * over_w, log_z = LOG1P(r) - m;
                V next = m + log_z + LOG1P(r_t * x / (1 + r_t) * -EXPM1(-s * log_z)) * over_s, change = ABS(next - m);
                int moves = 0;
                for (int lane = 0; lane < (int)(sizeof(V) / sizeof(REAL)); lane++) moves |= change[lane] > (REAL)1e-13;
                left |= moves && step < 40;
                if (moves && step < 40) at[i].m = PICK(next > 0, next, ALL(0));
                else at[i] = (NAMED(Two)){m, log_r, r, over_w, PICK(u[i] < INFINITY, x, ALL(-INFINITY)), in};
            }
        }
        return;
    }
    TOGETHER(i) {
        l[i] = KIND ? LOG1P_PRODUCT(gap[i], ALL(s * (REAL)exp2(1 - t))) * over_s : gap[i];
        at[i].r = EXP(-l[i]), at[i].m = LOG1P(at[i].r);
    }
    for (int step = s > (REAL)0.25 ? 0 : 1; KIND && step < STEPS; step++) TOGETHER(i) {
        V r = at[i].r, factor = s * EXP(-s * at[i].m), product = gap[i] * factor;
        V x = PICK(product < LARGE, product, ALL(LARGE)), whole = (1 + r) * (1 + x);
        l[i] += (LOG1P_PRODUCT(gap[i], factor) * over_s - l[i]) * (whole / (whole - r * x)); /* over the slope */
        at[i].r = EXP(-l[i]), at[i].m = LOG1P(at[i].r);
    }
    TOGETHER(i) {
        at[i].log_r = -l[i];
        at[i].r = KEEP(at[i].inside, at[i].r), at[i].m = KEEP(at[i].inside, at[i].m);
        at[i].over_w = KEEP(at[i].inside, KIND ? EXP(-s * l[i]) : ALL(1));
    }
}

typedef struct {
    V value, gradient;
} NAMED(Result);

/* The probability of the positive class and its derivative. */
INLINE NAMED(Result) NAMED(sigmoid)(V a, NAMED(Two) at, double t) {
    MASK positive = a >= 0;
    V p = EXP(-at.m), e = at.r * at.over_w, smaller = p * at.r;
    /* Of the larger p^t (1 - e), and of the smaller (p r)^t: the same number, from e = r^t and 1 / (1 + r^t). */
    V slope = EXP((REAL)-t * at.m) * e / (1 + e);
    MASK bad = ~(a < INFINITY);
    return (NAMED(Result)){PICK(bad, ALL(NAN), PICK(positive, p, smaller)), PICK(bad, ALL(NAN), slope)};
}

/* W Delta and its derivative, for class weights (1, w). */
INLINE NAMED(Result) NAMED(binary)(V a, V y, V w, NAMED(Two) at, double t1, double t2, const int KIND) {
    V m = at.m, p = EXP(-m), W = (1 - y) + w * y, over_W = 1 / W;
    V q_negative = (1 - y) * over_W, q_positive = w * y * over_W;
    MASK positive = a >= 0, edge = KIND < 0 ? at.x >= -1 : a == a;
    V q_top = PICK(positive, q_positive, q_negative), q = PICK(positive, q_negative, q_positive);
    V log_top = -m, log_p = at.log_r - m, smaller = KEEP(at.inside, EXP(log_p));
    REAL tau = (REAL)(1 - t1), gap = (REAL)(t2 - t1);
    V T_top = gap == 0 ? ALL(1) : EXP(gap * log_top);
    V T = gap == 0 ? KEEP(edge, ALL(1)) : KEEP(at.inside, EXP(gap * log_p));
    V e = at.r * at.over_w;
    if (t2 == 0) e = PICK(at.x == -1, ALL(1), e);
    V b_top = EXP(tau * log_top), b = KEEP(at.inside, tau == 0 ? ALL(1) : EXP(tau * log_p));
    V log_q_top = KEEP(q_top == 0, ALL(LOG_0)), log_q = KEEP(q == 0, ALL(LOG_0)), a_top = q_top, a_other = q;
    int soft = 0;
    for (int lane = 0; lane < (int)(sizeof(V) / sizeof(REAL)); lane++) /* 1 - q may round to 1 where q is not 0 */
        soft |= (q[lane] != 0 && q[lane] != 1) || (q_top[lane] != 0 && q_top[lane] != 1);
    if (soft) {
        log_q_top = LOG_OR(q_top), log_q = LOG_OR(q);
        a_top = KEEP(q_top > 0, EXP(tau * log_q_top)), a_other = KEEP(q > 0, EXP(tau * log_q));
    }
    V loss = NAMED(part)(t1, q_top, log_q_top, a_top, p, log_top, b_top, T_top, q_top == q_top, 1).loss;
    loss += NAMED(part)(t1, q, log_q, a_other, smaller, log_p, b, T, at.inside, 1).loss;
    /* y_hat - q of the positive class, as the difference of the smaller numbers. */
    V p_positive = PICK(positive, p, smaller), p_negative = PICK(positive, smaller, p);
    V off = PICK(q_positive > (REAL)0.5, q_negative - p_negative, p_positive - q_positive);
    V gradient = W * off * ((T_top * e + T) / (1 + e));
    MASK bad = ~(a < INFINITY), none = W == 0;
    loss = PICK(bad, ALL(NAN), PICK(loss < 0, ALL(0), W * loss));
    return (NAMED(Result)){KEEP(~none, loss), KEEP(~none, PICK(bad, ALL(NAN), gradient))};
}
