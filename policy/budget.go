package policy

import (
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/limit"
)

// Prices are units per token, by class of token. Tokens with the price 0 are free.
type Prices map[string]int64

// Cost returns the cost of a usage in units: the sum of tokens times price. The error names a class that has no price,
// or whose number of tokens is negative or too large.
func (p Prices) Cost(u limit.Usage) (int64, *limit.Error) {
	if len(p) == 0 {
		return 0, limit.NewError(limit.Invalid, "usage",
			"is for policies with prices, and this one has none: send a cost")
	}
	if len(u) > limit.MaxClasses {
		return 0, limit.NewError(limit.TooLarge, "usage",
			fmt.Sprintf("has %d classes, at most %d are taken", len(u), limit.MaxClasses))
	}
	sum := int64(0)
	for _, class := range slices.Sorted(maps.Keys(u)) {
		field := "usage." + strictyaml.Shorten(strconv.Quote(class))
		if limit.ValidPolicyName(class) {
			field = "usage." + class
		}
		price, ok := p[class]
		tokens := u[class]
		switch {
		case !ok:
			return 0, limit.NewError(limit.Invalid, field, "is a class of tokens that the policy has no price for")
		case tokens < 0:
			return 0, limit.NewError(limit.Invalid, field, "is negative: it must be at least 0")
		}
		hi, lo := bits.Mul64(uint64(tokens), uint64(price))
		if hi > 0 || lo > uint64(algo.MaxLimit-sum) {
			return 0, limit.NewError(limit.Invalid, field,
				"brings the cost above the largest one, 9007199254740992 (2^53)")
		}
		sum += int64(lo)
	}
	return sum, nil
}

// maxPrice bounds the price of a token, in units.
const maxPrice = 1 << 40

// initialEstimate is the default of initial_estimate, in units: it is reserved until enough has been learned.
const initialEstimate = 1000

// budget reads the fields about work whose cost is known later. limitsOf must have set p.Concurrency.
func (d *decoder) budget(f strictyaml.Fields, p *Policy) {
	p.Prices = d.prices(f.Field("prices"))
	estimate, initial := f.Field("estimate"), f.Field("initial_estimate")
	if n := estimate.Node; n != nil && n.Tag == "!!str" {
		p.Estimate, p.EstimateAuto = initialEstimate, d.Choice(estimate, "auto") == "auto"
	} else {
		p.Estimate = d.Integer(estimate, 1, algo.MaxLimit)
	}
	switch {
	case initial.Given() && !p.EstimateAuto:
		d.Fail(initial.Key, initial.Path, "is for estimate: auto: add that, or write the number as estimate")
	case initial.Given():
		p.Estimate = d.Integer(initial, 1, algo.MaxLimit)
	}
	p.ReleaseExpired = d.Choice(f.Field("on_expiry"), "charge", "release") == "release"
	for _, one := range f.Only("prices", "estimate", "initial_estimate", "on_expiry") {
		if p.Concurrency {
			d.Fail(one.Key, one.Path, "is not for concurrency, which has no reservations: remove it")
		}
	}
}

func (d *decoder) prices(f strictyaml.Field) Prices {
	classes, ok := d.Fields(f, nil)
	if !ok {
		return nil
	}
	if n := len(classes.List); n == 0 || n > limit.MaxClasses {
		d.Fail(f.Node, f.Path, "must have 1 to %d classes of tokens with their prices, such as {input: 3, output: 15}",
			limit.MaxClasses)
	}
	p := make(Prices, len(classes.List))
	for _, one := range classes.List {
		if !limit.ValidPolicyName(one.Name) {
			d.Fail(one.Key, one.Path, "is not the name of a class of tokens: 1 to 128 characters of A-Z a-z 0-9 . _ -")
		}
		p[one.Name] = d.Integer(one, 0, maxPrice)
	}
	return p
}
