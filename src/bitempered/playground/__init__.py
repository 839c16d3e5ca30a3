"""The playground: a local page where a logistic and a bi-tempered net train side by side on noisy labels."""
