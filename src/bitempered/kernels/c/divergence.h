/* One class's part of core.loss, and v = (y_hat - q) y_hat^(t2 - t1). A template: library.c has V and its functions. */

typedef struct {
    V loss, v;
} NAMED(Part);

/* Without cancellation, for every t1 < 2. With d = log(q / y_hat), a = q^(1 - t1) and b = y_hat^(1 - t1) it is

       b (q phi_{1-t1}(d) - q + y_hat) / (2 - t1)  =  b (q - y_hat - y_hat phi_{2-t1}(d)) / (t1 - 1),

   the first for t1 away from 2, the second for t1 away from 1. `risen` is b q phi(d) or b y_hat phi(d), a difference of
   powers. Next to t1 = 1 or 2 these cancel, and it is computed as a power times expm1, with the larger power, since
   the other may overflow. Near d = 0 everything cancels, and both formulas are b q times a series in d.
   T = y_hat^(t2 - t1); inside: where y_hat is not 0; EXACT: always with expm1. */
INLINE NAMED(Part) NAMED(part)(double t1, V q, V log_q, V a, V p, V log_p, V b, V T, MASK inside, const int EXACT) {
    REAL tau = (REAL)(1 - t1), kappa = (REAL)(2 - t1), rate = t1 > 1.5 ? kappa : tau, speed = FABS(rate);
    V d = log_q - log_p, size = ABS(d), q_or_p = t1 > 1.5 ? p : q, risen;
    if (!EXACT && speed > (REAL)1e-3) {
        risen = (q * a - q_or_p * b) / rate;
    } else {
        V rise = speed == 0 ? size : EXPM1(-speed * size) * (-1 / speed);
        risen = PICK(rate * d > 0, q * a, q_or_p * b) * PICK(d > 0, rise, -rise);
    }
    REAL c3 = tau - 1, c4 = tau * tau - c3, c5 = tau * tau * tau - c4, c6 = tau * tau * tau * tau - c5;
    REAL c7 = tau * tau * tau * tau * tau - c6, c8 = tau * tau * tau * tau * tau * tau - c7;
    V series = c5 / 120 + d * (c6 / 720 + d * (c7 / 5040 + d * (c8 / 40320)));
    series = (REAL)0.5 + d * (c3 / 6 + d * (c4 / 24 + d * series));
    V away = (risen - b * (q - p)) * (t1 > 1.5 ? 1 / tau : 1 / kappa);
    V of_0 = KEEP(q > 0, tau > 0 ? q * a * (1 / (tau * kappa)) : ALL(INFINITY));
    return (NAMED(Part)){PICK(inside, PICK(size < NEAR, b * q * d * d * series, away), of_0), (p - q) * T};
}
