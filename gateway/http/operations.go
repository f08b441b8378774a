package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/policy"
)

// This file has the operations of a limit.Service. operation and queried make the handlers: question decodes the body
// and has a form convert it, asked calls the Service, and a write function writes the answer. leases, reservations and
// adjustments list the routes. openapi.yaml must describe each of them.

// operation returns the handler of an operation whose request has a body. read converts the body to a question; ask
// calls the Service; write writes the answer. ask is not called when the body has a problem.
func operation[B, Q, A any](
	a *api, read func(*form, *B) Q, ask func(context.Context, Q) (A, error), write func(*exchange, A),
) http.HandlerFunc {
	return a.handler(func(x *exchange) {
		var body B
		q, p := question(x, &body, read)
		asked(x, q, p, ask, write)
	})
}

// question reads a body and converts it. With a problem the question is not usable.
func question[B, Q any](x *exchange, body *B, read func(*form, *B) Q) (q Q, p *problem) {
	f := form{api: x.api}
	if f.problem = x.decode(body); f.problem == nil {
		q = read(&f, body)
	}
	return q, f.problem
}

// queried returns the handler of an operation whose request has a query. body makes the JSON of the answer.
func queried[Q, A any](
	a *api, read func(raw string) (Q, *problem), ask func(context.Context, Q) (A, error), body func(Q, A) any,
) http.HandlerFunc {
	return a.handler(func(x *exchange) {
		question, p := read(x.r.URL.RawQuery)
		asked(x, question, p, ask, inJSON(func(answer A) any { return body(question, answer) }))
	})
}

// asked has a question answered, or answers with its problem.
func asked[Q, A any](x *exchange, question Q, p *problem,
	ask func(context.Context, Q) (A, error), write func(*exchange, A)) {
	if p != nil {
		x.problem(p)
		return
	}
	answer, err := ask(x.r.Context(), question)
	if err != nil {
		x.problem(problemOf(err))
		return
	}
	write(x, answer)
}

// inJSON returns a function that writes an answer as the JSON of body.
func inJSON[A any](body func(A) any) func(*exchange, A) {
	return func(x *exchange, answer A) { x.json(http.StatusOK, jsonType[0], body(answer)) }
}

// decided writes a decision. A refusal has a status of its own.
func (x *exchange) decided(d limit.Decision) { x.decision(&d, false) }

// form converts the fields of a body, and keeps the first problem. After a problem its results are not usable.
type form struct {
	api     *api
	problem *problem
}

func (f *form) fail(p *problem) {
	if f.problem == nil {
		f.problem = p
	}
}

// require keeps an error of a validation by package limit.
func (f *form) require(err *limit.Error) {
	if err != nil {
		f.fail(problemOf(err))
	}
}

// target reads the target of an operation, and validates what does not depend on the policies.
func (f *form) target(b *targetBody) limit.Target {
	t := limit.Target{Policy: b.Policy, Namespace: b.Namespace, Key: b.Key}
	switch {
	case b.Limit == nil:
	case f.api.NoInline:
		f.fail(invalid("limit", "inline limits are turned off on this node (no-inline)"))
	default:
		l, p := f.api.limit(b.Limit)
		if t.Limit = &l; p != nil {
			p.field = "limit." + p.field
			f.fail(p)
		}
	}
	f.require(t.Valid())
	return t
}

// cost reads a cost of at least least: 0 for checks and 1 for operations for which 0 has no meaning. A missing cost is
// 1.
func (f *form) cost(given *int64, least int64) int64 {
	if given == nil {
		return 1
	}
	if *given < least {
		f.fail(invalid("cost", fmt.Sprintf("must be at least %d, is %d", least, *given)))
	}
	f.require((&limit.Check{Cost: *given}).ValidCost())
	return *given
}

// requestID reads a request id.
func (f *form) requestID(id string) string {
	f.require((&limit.Check{RequestID: id}).ValidCost())
	return id
}

// amount reads a cost, of at least least, or a usage. absent is the cost when both are missing.
func (f *form) amount(b *amountBody, least, absent int64) limit.Amount {
	switch {
	case b.Cost == nil && b.Usage == nil:
		return limit.Amount{Cost: absent}
	case b.Cost == nil:
		return limit.Amount{Usage: limit.Usage(b.Usage)}
	case b.Usage != nil:
		f.fail(invalid("usage", "is given beside cost: send one of them"))
	}
	return limit.Amount{Cost: f.cost(b.Cost, least)}
}

// leaseID and reservationID read ids.
func (f *form) leaseID(id string) string { return f.held("lease_id", id, "acquire") }

func (f *form) reservationID(id string) string { return f.held("reservation_id", id, "reserve") }

func (f *form) held(field, id, by string) string {
	if id == "" {
		f.fail(invalid(field, "must be given, as "+by+" returned it"))
	}
	return id
}

// ttl reads the ttl of a lease or reservation; 0, the default, when it is missing. The Service checks it against the
// policy.
func (f *form) ttl(text string) time.Duration {
	if text == "" {
		return 0
	}
	d, err := policy.ParseDuration(text)
	switch {
	case err != nil:
		f.fail(invalid("ttl", err.Error()))
	case d < algo.MinWindow || d > algo.MaxWindow:
		f.fail(invalid("ttl", "must be from 1ms to 366d"))
	}
	return d
}

// check reads one check.
func (f *form) check(b *checkBody) limit.Check {
	return limit.Check{Target: f.target(&b.targetBody), Cost: f.cost(b.Cost, 0), Partial: b.Partial,
		RequestID: f.requestID(b.RequestID)}
}

// checks reads the checks of a batch.
func (f *form) checks(b *checksBody) []limit.Check {
	if len(b.Checks) == 0 {
		f.fail(invalid("checks", "must hold 1 to "+strconv.Itoa(limit.MaxBatch)+" checks"))
	}
	return elementsOf(f, "checks", b.Checks, (*form).check)
}

// reserve reads one reservation.
func (f *form) reserve(b *reserveBody) limit.Reserve {
	return limit.Reserve{
		Target: f.target(&b.targetBody), Amount: f.amount(&b.amountBody, 1, 1), Estimate: !b.given(), Class: b.Class,
		RequestID: f.requestID(b.RequestID), TTL: f.ttl(b.TTL),
	}
}

// leases returns the routes of leases.
func (a *api) leases() []Route {
	return []Route{
		{"POST", "/v1/acquire", auth.RoleCheck,
			operation(a, func(f *form, b *acquireBody) limit.Acquire {
				return limit.Acquire{
					Target: f.target(&b.targetBody), Cost: f.cost(b.Cost, 1), RequestID: f.requestID(b.RequestID),
					TTL: f.ttl(b.TTL),
				}
			}, a.Service.Acquire, (*exchange).decided)},
		{"POST", "/v1/renew", auth.RoleCheck, operation(a, func(f *form, b *renewBody) heldCall {
			return heldCall{f.target(&b.targetBody), f.leaseID(b.LeaseID), f.ttl(b.TTL)}
		}, func(ctx context.Context, q heldCall) (time.Duration, error) {
			return a.Service.Renew(ctx, q.Target, q.id, q.ttl)
		}, inJSON(func(lives time.Duration) any {
			// Rounded down, unlike every other duration here, so that a caller that relies on it stops before the lease
			// ends.
			return map[string]int64{"expires_in_ms": int64(lives / time.Millisecond)}
		}))},
		{"POST", "/v1/release", auth.RoleCheck, operation(a, func(f *form, b *releaseBody) heldCall {
			return heldCall{Target: f.target(&b.targetBody), id: f.leaseID(b.LeaseID)}
		}, func(ctx context.Context, q heldCall) (bool, error) {
			return a.Service.Release(ctx, q.Target, q.id)
		}, inJSON(func(released bool) any { return map[string]bool{"released": released} }))},
	}
}

// reservations returns the routes of reservations.
func (a *api) reservations() []Route {
	return []Route{
		{"POST", "/v1/reserve", auth.RoleCheck,
			operation(a, (*form).reserve, a.Service.Reserve, (*exchange).decided)},
		{"POST", "/v1/reserves", auth.RoleCheck,
			operation(a, func(f *form, b *reservesBody) []limit.Reserve {
				return elementsOf(f, "reserves", b.Reserves, (*form).reserve)
			}, a.Service.ReserveAll, (*exchange).all)},
		{"POST", "/v1/extend", auth.RoleCheck,
			operation(a, (*form).extend, a.Service.Extend, (*exchange).decided)},
		{"POST", "/v1/extends", auth.RoleCheck,
			operation(a, func(f *form, b *extendsBody) []limit.Extend {
				return elementsOf(f, "extends", b.Extends, (*form).extend)
			}, a.Service.ExtendEach, func(x *exchange, results []limit.Result) {
				x.each("extends", len(results), func(b []byte, i int) ([]byte, error) {
					return appendDecision(b, &results[i].Decision), results[i].Err
				})
			})},
		{"POST", "/v1/commit", auth.RoleCheck, operation(a, (*form).commit, a.Service.Commit,
			func(x *exchange, got limit.Settled) {
				x.w.Header()["Content-Type"] = jsonType
				x.out = appendSettled(x.out[:0], &got)
				x.write(http.StatusOK, x.out)
			})},
		{"POST", "/v1/commits", auth.RoleCheck,
			operation(a, func(f *form, b *commitsBody) []limit.Commit {
				return elementsOf(f, "commits", b.Commits, (*form).commit)
			}, a.Service.CommitEach, func(x *exchange, results []limit.SettledResult) {
				x.each("commits", len(results), func(b []byte, i int) ([]byte, error) {
					return appendSettled(b, &results[i].Settled), results[i].Err
				})
			})},
		{"POST", "/v1/cancel", auth.RoleCheck, operation(a, func(f *form, b *cancelBody) heldCall {
			return heldCall{Target: f.target(&b.targetBody), id: f.reservationID(b.ReservationID)}
		}, func(ctx context.Context, q heldCall) (int64, error) {
			return a.Service.Cancel(ctx, q.Target, q.id)
		}, inJSON(refunded))},
	}
}

// adjustments returns the routes of operations that change a key without a decision.
func (a *api) adjustments() []Route {
	return []Route{
		{"POST", "/v1/charge", auth.RoleCharge, operation(a, func(f *form, b *chargeBody) limit.Charge {
			return limit.Charge{Target: f.target(&b.targetBody), Amount: f.amount(&b.amountBody, 1, 1),
				RequestID: f.requestID(b.RequestID)}
		}, a.Service.Charge, func(x *exchange, d limit.Decision) {
			x.decision(&d, true) // charged in any case, so that no status says refused
		})},
		{"POST", "/v1/refund", auth.RoleRefund,
			operation(a, func(f *form, b *refundBody) limit.Check {
				return limit.Check{Target: f.target(&b.targetBody), Cost: f.cost(b.Cost, 1), RequestID: b.RequestID}
			}, func(ctx context.Context, q limit.Check) (int64, error) {
				return a.Service.Refund(ctx, q.Target, q.Cost, q.RequestID)
			}, inJSON(refunded))},
		{"POST", "/v1/reset", auth.RoleRefund,
			operation(a, (*form).target, func(ctx context.Context, t limit.Target) (bool, error) {
				return true, a.Service.Reset(ctx, t)
			}, inJSON(func(reset bool) any { return map[string]bool{"reset": reset} }))},
	}
}

// heldCall is the question of an operation on a lease or a reservation.
type heldCall struct {
	limit.Target
	id  string
	ttl time.Duration
}

// elementsOf reads the elements of a list.
func elementsOf[B, Q any](f *form, name string, bodies []B, read func(*form, *B) Q) []Q {
	asks := make([]Q, len(bodies))
	for i := range asks {
		if asks[i] = read(f, &bodies[i]); f.problem != nil {
			f.problem.ofElement(name, i)
			break
		}
	}
	return asks
}

// extend reads an extension of a reservation.
func (f *form) extend(b *extendBody) limit.Extend {
	return limit.Extend{
		Target: f.target(&b.targetBody), ReservationID: f.reservationID(b.ReservationID),
		Amount: f.amount(&b.amountBody, 0, 0), RequestID: f.requestID(b.RequestID), TTL: f.ttl(b.TTL),
	}
}

// each writes the results of a list's elements. one appends a result, or returns an error, which is written in its
// place.
func (x *exchange) each(list string, n int, one func([]byte, int) ([]byte, error)) {
	x.list(append(x.out[:0], `{"results":[`...), list, n, one)
}

// list writes an object whose last member is a list of n elements; b is its beginning. one is as for each.
func (x *exchange) list(b []byte, list string, n int, one func([]byte, int) ([]byte, error)) {
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		out, err := one(b, i)
		if err != nil {
			out = x.appendItemError(b, err, list, i)
		}
		b = out
	}
	x.out = append(b, "]}"...)
	x.w.Header()["Content-Type"] = jsonType
	x.answering(x.taken)
	x.write(http.StatusOK, x.out)
}

// commit reads a commit of a reservation.
func (f *form) commit(b *commitBody) limit.Commit {
	c := limit.Commit{Target: f.target(&b.targetBody), Exact: b.Overrun == "error", Class: b.Class}
	if !b.given() {
		f.fail(invalid("cost", "must be given: what it did cost; or usage, what was used"))
	}
	if b.Overrun != "" && b.Overrun != "charge" && b.Overrun != "error" {
		f.fail(invalid("overrun", "must be charge or error"))
	}
	c.ReservationID, c.Amount = f.reservationID(b.ReservationID), f.amount(&b.amountBody, 0, 0)
	return c
}

func appendSettled(b []byte, got *limit.Settled) []byte {
	b = appendInt(appendInt(b, `{"refunded":`, got.Refunded), `,"excess":`, got.Excess)
	return append(appendBool(b, `,"over_limit":`, got.Over), '}')
}

// refunded returns the answer of operations that give units back.
func refunded(units int64) any { return map[string]int64{"refunded": units} }
