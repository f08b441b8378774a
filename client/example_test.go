package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/weirlimit/weir/client/local"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/policy"
)

const policies = `
policies:
  - {name: login, algorithm: sliding_log, limit: 2, window: 1m}
  - {name: tokens, algorithm: sliding_log, limit: 1000, window: 1h}
  - {name: mail, algorithm: token_bucket, limit: 100, window: 1s, capacity: 1}
  - {name: export, algorithm: concurrency, limit: 1, ttl: 30s}
`

// open returns a Client that needs no cluster. Dial gives one of the same type that asks a cluster.
func open() *client.Client {
	set, err := policy.Parse("policies.yaml", []byte(policies))
	if err != nil {
		log.Fatal(err)
	}
	return local.New(set)
}

// A login handler that lets each user try twice a minute.
func ExampleDial() {
	ctx := context.Background()
	c, err := client.Dial(ctx, "weir-0.weir-headless:8081,weir-1.weir-headless:8081",
		client.WithTimeout(200*time.Millisecond))
	if err != nil {
		log.Fatal(err) // a mistyped address or option; nobody was asked yet
	}
	defer c.Close()

	login := c.Policy("login")
	http.HandleFunc("POST /login", func(w http.ResponseWriter, r *http.Request) {
		d, err := login.Allow(r.Context(), r.PostFormValue("user"))
		switch {
		case errors.Is(err, client.ErrInvalid), errors.Is(err, client.ErrTooLarge):
			http.Error(w, "bad user name", http.StatusBadRequest)
		case err != nil:
			http.Error(w, "sorry", http.StatusInternalServerError)
		case !d.Allowed:
			http.Error(w, "too many attempts", http.StatusTooManyRequests)
		default:
			// d.FailedOpen tells when the cluster could not be asked.
		}
	})
}

func ExampleLimiter_Allow() {
	c := open()
	defer c.Close()
	login := c.Policy("login")
	for range 3 {
		d, err := login.Allow(context.Background(), "alice")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, d.Remaining, d.RetryAfter.Round(time.Minute))
	}
	// Output:
	// true 1 0s
	// true 0 0s
	// false 0 1m0s
}

func ExampleLimiter_Wait() {
	c := open()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	mail := c.Policy("mail")
	for i := range 3 {
		if _, err := mail.Wait(ctx, "example.org"); err != nil {
			log.Fatal(err)
		}
		fmt.Println("mail", i+1)
	}
	_, err := mail.WaitN(ctx, "example.org", 5)
	fmt.Println(errors.Is(err, client.ErrNever))
	// Output:
	// mail 1
	// mail 2
	// mail 3
	// true
}

func ExampleLimiter_Acquire() {
	c := open()
	defer c.Close()
	export := c.Policy("export")
	ctx := context.Background()

	lease, _, err := export.Acquire(ctx, "tenant-7")
	if err != nil {
		log.Fatal(err)
	}
	if lease == nil {
		fmt.Println("busy")
		return
	}
	defer lease.Release()

	// While the lease is held and renews itself, nobody else gets one.
	second, d, err := export.Acquire(ctx, "tenant-7")
	fmt.Println(second == nil, d.Allowed, err)

	select {
	case <-lease.Lost():
		fmt.Println("stop the work")
	default:
		fmt.Println("go on")
	}
	// Output:
	// true false <nil>
	// go on
}

func ExampleClient_Inline() {
	c := open()
	defer c.Close()
	perUser := c.Inline("api", algo.Limit{Algorithm: algo.SlidingLog, Limit: 1, Window: time.Hour})
	for range 2 {
		d, err := perUser.Allow(context.Background(), "alice")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Policy, d.Allowed)
	}
	// Output:
	// inline true
	// inline false
}

func ExampleClient_Check() {
	c := open()
	defer c.Close()
	results, err := c.Check(context.Background(), []client.Check{
		{Policy: "login", Key: "alice"},
		{Policy: "login", Key: "bob", Cost: 5, Partial: true},
		{Policy: "login", Key: "carol", Peek: true},
		{Policy: "nonesuch", Key: "dave"},
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range results {
		fmt.Println(r.Allowed, r.Granted, errors.Is(r.Err, client.ErrNotFound))
	}
	// Output:
	// true 1 false
	// true 2 false
	// true 0 false
	// false 0 true
}

// One request that has to pass the limits of its user and of its team: what one of them refuses is not charged to the
// other.
func ExampleClient_All() {
	c := open()
	defer c.Close()
	checks := []client.Check{{Policy: "login", Key: "alice"}, {Policy: "login", Key: "team-7", Cost: 2}}
	for range 2 {
		all, err := c.All(context.Background(), checks)
		if err != nil {
			log.Fatal(err)
		}
		tightest := all.Tightest()
		fmt.Println(all.Allowed, tightest.Remaining, tightest.RetryAfter.Round(time.Minute))
	}
	// Output:
	// true 0 0s
	// false 0 1m0s
}

// Work whose cost is known only when it is done: the most that it may cost is charged first, and what was not used is
// given back.
func ExampleLimiter_ReserveN() {
	c := open()
	defer c.Close()
	tokens := c.Policy("tokens")
	ctx := context.Background()
	r, d, err := tokens.ReserveN(ctx, "tenant-7", 400, time.Minute)
	if err != nil {
		log.Fatal(err)
	}
	if !d.Allowed {
		fmt.Println("try again in", d.RetryAfter)
		return
	}
	defer r.Cancel() // does nothing once the reservation is committed
	fmt.Println("reserved", r.Units(), "left", d.Remaining)
	if err := r.Commit(150); err != nil {
		log.Fatal(err)
	}
	d, err = tokens.Peek(ctx, "tenant-7")
	fmt.Println("left", d.Remaining, err)
	// Output:
	// reserved 400 left 600
	// left 850 <nil>
}

// Work that turns out to be larger, or to take longer: it goes on as long as there is room for more.
func ExampleReservation_Extend() {
	c := open()
	defer c.Close()
	ctx := context.Background()
	r, _, err := c.Policy("tokens").ReserveN(ctx, "tenant-8", 600, time.Minute)
	if err != nil || r == nil {
		log.Fatal(err)
	}
	defer r.Cancel()
	for range 2 {
		d, err := r.Extend(ctx, 300, time.Minute)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, r.Units())
	}
	// Output:
	// true 900
	// false 900
}

// CommitCost says what a commit has changed: work that has cost more than was reserved is charged all the same.
func ExampleReservation_CommitCost() {
	c := open()
	defer c.Close()
	r, _, err := c.Policy("tokens").ReserveN(context.Background(), "tenant-9", 900, time.Minute)
	if err != nil || r == nil {
		log.Fatal(err)
	}
	settled, err := r.CommitCost(1200)
	fmt.Println(settled.Refunded, settled.Excess, settled.Over, err)
	// Output:
	// 0 300 true <nil>
}

// Several budgets for one piece of work: all are charged, or none is.
func ExampleClient_ReserveAll() {
	c := open()
	defer c.Close()
	tokens := c.Policy("tokens")
	rs, all, err := c.ReserveAll(context.Background(), []client.Claim{
		{Limiter: tokens, Key: "org-1", Work: client.Work{Cost: 300}},
		{Limiter: tokens, Key: "user-1", Work: client.Work{Cost: 300}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(all.Allowed, len(rs))
	for _, r := range rs {
		if err := r.Commit(100); err != nil {
			log.Fatal(err)
		}
	}
	d, err := tokens.Peek(context.Background(), "user-1")
	fmt.Println(d.Remaining, err)
	// Output:
	// true 2
	// 900 <nil>
}

// Work that has been done already is counted, whether or not there is room for it.
func ExampleLimiter_Charge() {
	c := open()
	defer c.Close()
	for range 2 {
		d, err := c.Policy("tokens").Charge(context.Background(), "tenant-10", 800)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, d.Granted)
	}
	// Output:
	// true 800
	// false 800
}
