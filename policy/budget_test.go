package policy

import (
	"errors"
	"math/big"
	"strings"
	"testing"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
)

func TestBudget(t *testing.T) {
	p := mustGet(t, mustParse(t, `policies:
  - name: p
    algorithm: fixed_window
    align: calendar
    window: month
    anchor: 31
    limit: 100
    prices: {input: 3, cached: 0}
    estimate: auto
`), "p")
	expect.True(t, p.Prices["input"] == 3 && len(p.Prices) == 2 && p.Estimate == 1000 && p.EstimateAuto &&
		p.Limits[0].Anchor == 31, "%+v", p)
	p = mustGet(t, mustParse(t, "policies: [{name: p, limits: [1/1s], estimate: 7}]"), "p")
	expect.True(t, p.Estimate == 7 && !p.EstimateAuto && p.Prices == nil && !p.ReleaseExpired, "%+v", p)
	for word, release := range map[string]bool{"charge": false, "release": true} {
		p := mustGet(t, mustParse(t, "policies: [{name: p, limits: [1/1s], on_expiry: "+word+"}]"), "p")
		expect.Equal(t, p.ReleaseExpired, release, "%s: %+v", word, p)
	}
	p = mustGet(t, mustParse(t,
		"policies: [{name: p, algorithm: fixed_window, limits: [1/1s, {limit: 5, window: 1h, carry_debt: false}], carry_debt: true, max_debt: 9}]"), "p")
	expect.True(t, p.Limits[0].CarryDebt && !p.Limits[1].CarryDebt && p.Limits[0].MaxDebt == 9, "%+v", p.Limits)

	// What means the same has one hash, and what does not has another.
	hash := func(fields string) string {
		return mustParse(t, "policies: [{name: p, algorithm: fixed_window, limit: 9, "+fields+"}]").Hash()
	}
	const month = "align: calendar, window: month"
	expect.True(t, hash(month) == hash(month+", anchor: 1") && hash(month) != hash(month+", anchor: 2"), "anchor")
	plain := hash("window: 1m")
	for _, more := range []string{"carry_debt: true", "max_debt: 2", "prices: {a: 1}", "prices: {a: 2}",
		"estimate: 1000", "estimate: auto", "estimate: auto, initial_estimate: 2", "on_expiry: release"} {
		expect.True(t, hash("window: 1m, "+more) != plain, "%s is not in the hash", more)
	}
	expect.Equal(t, hash("window: 1m, on_expiry: charge"), plain, "on_expiry")
	expect.True(t, hash("window: 1m, estimate: auto") != hash("window: 1m, estimate: 1000") &&
		hash("window: 1m, prices: {b: 1, a: 2}") == hash("window: 1m, prices: {a: 2, b: 1}"), "estimate or prices")
}

func TestBudgetMistakes(t *testing.T) {
	const log, month = "limits: [1/1s]", "algorithm: fixed_window, align: calendar, window: month, limit: 1"
	many := "{"
	for i := range limit.MaxClasses + 1 {
		many += string(rune('a'+i)) + ": 1, "
	}
	for _, test := range []struct{ fields, want string }{
		{log + ", prices: 3", "policies[0].prices: must be a map"},
		{log + ", prices: {}", "policies[0].prices: must have 1 to 16 classes"},
		{log + ", prices: {a b: 1}", "is not the name of a class of tokens"},
		{log + ", prices: {a: -1}", "policies[0].prices.a: "},
		{log + ", prices: {a: 0.5}", "policies[0].prices.a: "},
		{log + ", prices: {a: 1099511627777}", "policies[0].prices.a: "},
		{log + ", prices: {a: 1, a: 2}", "policies[0].prices.a: "},
		{log + ", prices: " + many + "}", "policies[0].prices: must have 1 to 16 classes"},
		{log + ", prices: ", "policies[0].prices: "},
		{log + ", estimate: automatic", "policies[0].estimate: must be one of auto"},
		{log + ", estimate: 0", "policies[0].estimate: "},
		{log + ", estimate: [1]", "policies[0].estimate: must be a whole number"},
		{log + ", initial_estimate: 5", "policies[0].initial_estimate: is for estimate: auto"},
		{log + ", estimate: 4, initial_estimate: 5", "policies[0].initial_estimate: is for estimate: auto"},
		{log + ", estimate: auto, initial_estimate: 0", "policies[0].initial_estimate: "},
		{log + ", on_expiry: forget", "policies[0].on_expiry: "},
		{log + ", on_expiry: ", "policies[0].on_expiry: "},
		{log + ", overrides: [{key: a, limit: 1, window: 1s, on_expiry: release}]",
			"policies[0].overrides[0].on_expiry: unknown field"},
		{"algorithm: concurrency, limit: 1, ttl: 1s, on_expiry: release",
			"policies[0].on_expiry: is not for concurrency"},
		{"algorithm: concurrency, limit: 1, ttl: 1s, estimate: 3", "policies[0].estimate: is not for concurrency"},
		{"algorithm: concurrency, limit: 1, ttl: 1s, prices: {a: 1}", "policies[0].prices: is not for concurrency"},
		{"algorithm: concurrency, limit: 1, ttl: 1s, max_debt: 1", "policies[0].max_debt: is a parameter of"},
		{month + ", anchor: 0", "policies[0].anchor: "},
		{month + ", anchor: 32", "policies[0].anchor: "},
		{"algorithm: fixed_window, align: calendar, window: day, limit: 1, anchor: 2",
			"policies[0].anchor: is for windows of a calendar month only"},
		{"algorithm: fixed_window, window: 1m, limit: 1, anchor: 2",
			"policies[0].anchor: is for windows of a calendar month only"},
		{"algorithm: token_bucket, window: 1m, limit: 1, anchor: 2",
			"policies[0].anchor: is a parameter of fixed_window"},
		{"algorithm: fixed_window, align: calendar, window: hour, limit: 1, carry_debt: true",
			"policies[0].carry_debt: is for fixed_window only, and not for minutes and hours of the calendar"},
		{"algorithm: token_bucket, window: 1m, limit: 1, carry_debt: true",
			"policies[0].carry_debt: is a parameter of fixed_window"},
		{log + ", max_debt: 0", "policies[0].max_debt: "},
		{"limit: -1, max_debt: 3", "policies[0].max_debt: is for a limit, and this one is unlimited"},
		{"limit: -1, carry_debt: true", "policies[0].carry_debt: is for a limit, and this one is unlimited"},
	} {
		_, err := Parse("f", []byte("policies: [{name: p, "+test.fields+"}]"))
		var list Errors
		expect.True(t, errors.As(err, &list) && strings.Contains(err.Error(), test.want) && list[0].Line == 1 &&
			list[0].Column >= 12, "%s: %v, want %q", test.fields, err, test.want)
	}
}

// FuzzCost holds the cost of a usage to what big integers make of it.
func FuzzCost(f *testing.F) {
	f.Add(int64(3), int64(1), int64(15), int64(100), int64(0), int64(30))
	f.Add(int64(1)<<40, int64(1)<<40, int64(1), int64(1)<<13, int64(0), int64(0))
	f.Add(int64(1)<<40, int64(1)<<40, int64(1), int64(1)<<12, int64(1)<<12, int64(1))
	f.Add(int64(1), int64(1), int64(1), int64(1)<<62, int64(1)<<62, int64(-1))
	f.Fuzz(func(t *testing.T, p, q, r, x, y, z int64) {
		prices := Prices{"a": p & (maxPrice - 1), "b": q & (maxPrice - 1), "c": max(r, -r, 0) & (maxPrice - 1)}
		use := limit.Usage{"a": x, "b": y, "c": z}
		sum, negative := new(big.Int), false
		for class, n := range use {
			sum.Add(sum, new(big.Int).Mul(big.NewInt(n), big.NewInt(prices[class])))
			negative = negative || n < 0
		}
		got, err := prices.Cost(use)
		fits := !negative && sum.Cmp(big.NewInt(algo.MaxLimit)) <= 0
		expect.True(t, fits == (err == nil) && (!fits || got == sum.Int64()),
			"%v at %v: %d, %v, want %v", use, prices, got, err, sum)
		expect.True(t, err == nil || err.Kind == limit.Invalid && strings.HasPrefix(err.Field, "usage."), "%v", err)
	})
}
