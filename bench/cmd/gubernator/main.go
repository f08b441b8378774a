// Command gubernator runs one Gubernator daemon, set up by the environment as Gubernator's own command is, for the
// harness to compare with. It differs in two things.
//
// It leaves the tracer provider out: Gubernator's own command does not start with the OpenTelemetry that the rest of
// this module needs (it merges resources of two schema versions), and without one Gubernator is at its cheapest.
//
// It takes the list of peers as a flag: by gossip, daemons on one host are all known under the host's name and never
// become a cluster.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/gubernator-io/gubernator/v2"
	"github.com/sirupsen/logrus"
)

func main() {
	peers := flag.String("peers", "", "gRPC `addresses` of all daemons, with GUBER_PEER_DISCOVERY_TYPE=none")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	conf, err := gubernator.SetupDaemonConfig(logrus.StandardLogger(), nil)
	if err != nil {
		log.Fatalf("gubernator: %v", err)
	}
	starting, cancel := context.WithTimeout(ctx, 20*time.Second)
	daemon, err := gubernator.SpawnDaemon(starting, conf)
	cancel()
	if err != nil {
		log.Fatalf("gubernator: %v", err)
	}
	if *peers != "" {
		var infos []gubernator.PeerInfo
		for _, address := range strings.Split(*peers, ",") {
			infos = append(infos, gubernator.PeerInfo{GRPCAddress: address})
		}
		daemon.SetPeers(infos)
	}
	<-ctx.Done()
	daemon.Close()
}
