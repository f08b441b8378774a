// Command weir is a node of Weir, and the commands to work with a cluster.
//
//	go install github.com/weirlimit/weir/cmd/weir@latest
package main

import "github.com/weirlimit/weir/internal/cli"

func main() { cli.Main() }
