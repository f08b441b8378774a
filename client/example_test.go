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
	c, err := client.Dial(ctx, "weir-0.weir-headless:8081,weir-1.weir-headless:8081", client.WithTimeout(200*time.Millisecond))
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
