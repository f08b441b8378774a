package policy

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/test/expect"
)

func TestParseDuration(t *testing.T) {
	const day = 24 * time.Hour
	for _, test := range []struct {
		text string
		want time.Duration
		err  string // part of it
	}{
		{"1s", time.Second, ""},
		{"250ms", 250 * time.Millisecond, ""},
		{"1h30m", 90 * time.Minute, ""},
		{"1d", day, ""},
		{"1d12h", 36 * time.Hour, ""},
		{"0.5d", 12 * time.Hour, ""},
		{".5d1.5h", 13*time.Hour + 30*time.Minute, ""},
		{"1.d", day, ""},
		{"0s", 0, ""},
		{"0d", 0, ""},
		{"5µs", 5 * time.Microsecond, ""},
		{"9223372036854775807ns", math.MaxInt64, ""},
		{"106751d23h47m16.854775807s", math.MaxInt64, ""},
		{"106751d23h47m16.854775808s", 0, "too long"},
		{"106752d", 0, "too long"},
		{"9223372036854775808ns", 0, "too long"},
		{"99999999999999999999d", 0, "too long"},
		{"99999999999999999999h", 0, "too long"},
		{"-1s", 0, "not a duration"},
		{"-0s", 0, "not a duration"},
		{"1d-12h", 0, "not a duration"},
		{"+1s", 0, "not a duration"},
		{"1d+1h", 0, "not a duration"},
		{"12h1d", 0, "not a duration"},
		{"1d1d", 0, "not a duration"},
		{"d", 0, "not a duration"},
		{".d", 0, "not a duration"},
		{"", 0, "not a duration"},
		{"1 s", 0, "not a duration"},
		{"1w", 0, "not a duration"},
		{"1D", 0, "not a duration"},
		{"1e3s", 0, "not a duration"},
		{"day", 0, "not a duration"},
		{"60", 0, "not a duration"},
		{"0", 0, "not a duration"},
		{strings.Repeat("x", 1000), 0, "xxxx…"},
	} {
		got, err := ParseDuration(test.text)
		expect.True(t, test.err != "" || err == nil && got == test.want,
			"%q: got %v, %v, want %v", test.text, got, err, test.want)
		expect.True(t, test.err == "" || err != nil && got == 0 && strings.Contains(err.Error(), test.err),
			"%q: got %v, %v, want an error with %q", test.text, got, err, test.err)
	}
}

func TestParseRate(t *testing.T) {
	for _, test := range []struct {
		text   string
		limit  int64
		window time.Duration
		err    string
	}{
		{"10/1s", 10, time.Second, ""},
		{"1000/1h", 1000, time.Hour, ""},
		{"1_000/1d", 1000, 24 * time.Hour, ""},
		{"9007199254740992/366d", algo.MaxLimit, algo.MaxWindow, ""},
		{"1/1ms", 1, time.Millisecond, ""},
		{"9007199254740993/1s", 0, 0, "limit must be from 1 to 9007199254740992"},
		{"99999999999999999999/1s", 0, 0, "limit must be from 1"},
		{"0/1s", 0, 0, "limit must be from 1"},
		{"-1/1s", 0, 0, "limit must be from 1"},
		{"-99999999999999999999/1s", 0, 0, "limit must be from 1"},
		{"1.5/1s", 0, 0, "limit must be a whole decimal number"},
		{"1/0s", 0, 0, "window must be from 1ms to 366d"},
		{"1/999us", 0, 0, "window must be from"},
		{"1/367d", 0, 0, "window must be from"},
		{"1/s", 0, 0, `window "s" is not a duration`},
		{"1/1s/1s", 0, 0, `window "1s/1s" is not a duration`},
		{"/", 0, 0, "limit must be a whole decimal number"},
		{"10", 0, 0, `"10" is not a rate`},
		{"", 0, 0, `"" is not a rate`},
		{"10 / 1s", 0, 0, "limit must be a whole decimal number"},
	} {
		limit, window, err := ParseRate(test.text)
		if limit != test.limit || window != test.window || (err == nil) != (test.err == "") {
			t.Errorf("%q: got %d, %v, %v", test.text, limit, window, err)
		} else if err != nil && !strings.HasPrefix(err.Error(), test.err) {
			t.Errorf("%q: got %v, want %s", test.text, err, test.err)
		}
	}
}

func TestParseInteger(t *testing.T) {
	for text, ok := range map[string]bool{
		"1": true, "10": true, "1_000": true, "1_0_0": true,
		"_1": false, "1_": false, "1__0": false, "01": false, "00": false, "+1": false, "1.0": false, "1e3": false,
		"0x1": false, "0b1": false, "0o7": false, "": false, "-": false, "--1": false, "1 ": false, "１": false,
	} {
		_, err := strictyaml.ParseInteger(text, 1, algo.MaxLimit)
		expect.Equal(t, (err == nil), ok, "%q: %v", text, err)
	}
}

// FuzzParseDuration: what both read, both read alike.
func FuzzParseDuration(f *testing.F) {
	for _, text := range []string{"1s", "1d12h", "0.1d", "-1s", "60", "1h1d", ".s"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := ParseDuration(text)
		expect.True(t, got >= 0, "%q is %v", text, got)
		if want, goErr := time.ParseDuration(text); goErr == nil && want >= 0 && err == nil && got != want {
			t.Errorf("%q: got %v, want %v", text, got, want)
		} else if goErr != nil && err == nil && !strings.Contains(text, "d") {
			t.Errorf("%q: got %v, want an error", text, got)
		}
	})
}
