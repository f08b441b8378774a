package cli

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"
)

// auto is the value of a setting that follows from the memory there is.
const auto = "auto"

// value is a flag whose text is looked at when it is set, so that what is wrong with it is said of the place where it was
// set: the command line, the environment, a line of the file.
type value[T any] struct {
	to         *T
	text, kind string
	parse      func(string) (T, error)
}

// settingVar returns a flag that sets *to, by default to what text says, which must be right.
func settingVar[T any](to *T, parse func(string) (T, error), kind, text string) pflag.Value {
	v := &value[T]{to: to, kind: kind, parse: parse}
	if err := v.Set(text); err != nil {
		panic("settings: default of a flag: " + err.Error())
	}
	return v
}

// Set implements pflag.Value.
func (v *value[T]) Set(text string) (err error) {
	v.text = text
	*v.to, err = v.parse(text)
	return err
}

// String implements pflag.Value.
func (v *value[T]) String() string { return v.text }

// Type implements pflag.Value.
func (v *value[T]) Type() string { return v.kind }

// orNone returns a parser that reads 0 as -1, which stands for no bound or for none, and leaves the rest to another.
func orNone[T int | int64 | time.Duration](parse func(string) (T, error)) func(string) (T, error) {
	return func(s string) (T, error) {
		n, err := parse(s)
		if err == nil && n == 0 {
			n = -1
		}
		return n, err
	}
}

// parseKeys reads a number of keys.
func parseKeys(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a whole number of keys", s)
	}
	return n, nil
}

// parseInlineMemory reads an amount of memory, or 0 for no bound.
func parseInlineMemory(s string) (int64, error) {
	if s == "0" {
		return 0, nil
	}
	return parseSize(64<<10, 1<<50)(s)
}

// autoOr returns a parser that reads auto as 0, and leaves the rest to another.
func autoOr[T any](parse func(string) (T, error)) func(string) (T, error) {
	return func(s string) (value T, err error) {
		if s == auto {
			return value, nil
		}
		return parse(s)
	}
}

// parseNumber returns a parser of numbers from least on.
func parseNumber(least int) func(string) (int, error) {
	return func(s string) (int, error) {
		n, err := strconv.ParseInt(s, 10, 32)
		if err != nil || int(n) < least {
			return 0, fmt.Errorf("%q is not a number from %d to %d", s, least, math.MaxInt32)
		}
		return int(n), nil
	}
}

// parseWait reads a time to wait, which is above 0.
func parseWait(s string) (time.Duration, error) {
	d, err := parseBound(s)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q is not a time to wait, such as 500ms", s)
	}
	return d, err
}

// parseBound reads a time, or 0.
func parseBound(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a time, such as 1m30s", s)
	}
	return d, nil
}

// parseSize returns a parser of amounts of memory within bounds.
func parseSize(least, most uint64) func(string) (int64, error) {
	return func(s string) (int64, error) {
		n, err := humanize.ParseBytes(s)
		if err != nil || n < least || n > most {
			return 0, fmt.Errorf("%q is not a size from %s to %s", s, humanize.IBytes(least), humanize.IBytes(most))
		}
		return int64(n), nil
	}
}
