package weir_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"time"

	"github.com/weirlimit/weir"
)

// Two members in one program, which would be two programs on two hosts: what one admits, the other counts.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	policies := []byte(`
policies:
  - {name: login, algorithm: sliding_log, limit: 2, window: 1m}
`)
	var members []*weir.Node
	for _, name := range []string{"web-0", "web-1"} {
		cfg := weir.Config{
			Name: name, GossipPort: weir.AnyPort, PeerPort: weir.AnyPort, // 7946 and 7947 by convention
			Policies: policies, Timeout: 10 * time.Second, Logger: slog.New(slog.DiscardHandler),
		}
		for _, m := range members {
			cfg.Join = append(cfg.Join, m.Addresses().Gossip)
		}
		n, err := weir.NewNode(cfg)
		if err != nil {
			log.Fatal(err) // names the field
		}
		if err := n.Start(ctx); err != nil {
			log.Fatal(err)
		}
		defer n.Stop(ctx) // hands over to who stays
		members = append(members, n)
	}
	for _, n := range members {
		if err := n.Await(ctx); err != nil {
			log.Fatal(err)
		}
	}
	for _, n := range append(members, members...) {
		d, err := n.Client().Policy("login").Allow(ctx, "alice")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, d.Remaining)
	}
	// Output:
	// true 1
	// true 0
	// false 0
	// false 0
}
